"""A room imports only from the rooms above it: the tree is the architecture."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tpukit"
# Top to bottom, as in docs/architecture.md.
ROOMS = [
    *(
        "errors",
        "annotations",
        "lazy",
        "frameworks",
        "rotary",
        "hardware",
        "runtime",
        "pages",
        "compiler",
        "kernels",
        "parallel",
        "models",
    ),
    *("step", "quantization", "job", "checker", "planner", "records", "training", "observe"),
    *("pods", "torch", "rehearsal", "mcp", "cli"),
]
FRONT_DOORS = ("__init__", "__main__", "adaptive_kernels", "tpu_config")
FILES = sorted(SOURCE.rglob("*.py"))


def rooms_imported_by(path: Path) -> set[str]:
    package = ("tpukit", *path.relative_to(SOURCE).parent.parts)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "tpukit" and len(parts) > 1 and parts[1] in ROOMS:
                found.add(parts[1])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_only_rooms_above(path):
    relative = path.relative_to(SOURCE)
    room = relative.parts[0].removesuffix(".py")
    if room in FRONT_DOORS:
        return  # they re-export from every room
    assert room in ROOMS, f"{relative} is in no room; rooms are {', '.join(ROOMS)}"
    below = {other for other in rooms_imported_by(path) if ROOMS.index(other) > ROOMS.index(room)}
    assert not below, f"{relative} imports {sorted(below)}, which lie below '{room}'"


def test_the_check_can_fail(tmp_path, monkeypatch):
    bad = tmp_path / "hardware" / "bad.py"
    bad.parent.mkdir()
    bad.write_text("from ..cli import main\nimport tpukit.job.train\n")
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    assert rooms_imported_by(bad) == {"cli", "job"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_is_past_the_cap(path):
    assert len(path.read_text().splitlines()) <= 800
