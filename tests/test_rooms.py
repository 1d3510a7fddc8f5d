"""A room imports only from the rooms above it: the tree is the architecture."""

import ast
from pathlib import Path

from tpukit.records import names

SOURCE = Path(__file__).parents[1] / "src" / "tpukit"
# Top to bottom, as in docs/architecture.md.
ROOMS = [
    *(
        "errors",
        "exit_codes",
        "plain_data",
        "annotations",
        "lazy",
        "frameworks",
        "rotary",
        "terminal",
        "shown",
        "hardware",
        "runtime",
        "records",
        "pages",
        "compiler",
        "capturing",
        "kernels",
        "parallel",
        "models",
    ),
    *("step", "quantization", "job", "checker", "planner", "training", "observe"),
    *("pods", "torch", "rehearsal", "mcp", "cli"),
]
FRONT_DOORS = ("__init__", "__main__", "adaptive_kernels", "pytest_plugin", "tpu_config")
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


def test_imports_only_rooms_above():
    wrong = []
    for path in FILES:
        relative = path.relative_to(SOURCE)
        room = relative.parts[0].removesuffix(".py")
        if room in FRONT_DOORS:
            continue  # they re-export from every room
        if room not in ROOMS:
            wrong.append(f"{relative} is in no room; rooms are {', '.join(ROOMS)}")
            continue
        above = ROOMS[: ROOMS.index(room) + 1]
        if below := sorted(rooms_imported_by(path).difference(above)):
            wrong.append(f"{relative} imports {below}, which lie below '{room}'")
    assert not wrong, "\n".join(wrong)


def test_the_check_can_fail(tmp_path, monkeypatch):
    bad = tmp_path / "hardware" / "bad.py"
    bad.parent.mkdir()
    bad.write_text("from ..cli import main\nimport tpukit.job.train\n")
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    assert rooms_imported_by(bad) == {"cli", "job"}


def test_no_file_is_past_the_cap():
    lengths = {path: len(path.read_text().splitlines()) for path in FILES}
    assert not [str(path) for path, length in lengths.items() if length > 800]


def test_the_files_of_a_run_are_named_in_one_place():
    files = {name for key, name in vars(names).items() if key.endswith("_FILE")}
    assert "metrics.jsonl" in files
    assert homes_of(files, FILES) == {name: {"records/names.py"} for name in files}


def test_the_figures_of_a_run_are_named_in_one_place():
    """Predictions and results have JSON of their own, in which some names are the same."""
    others = {
        *("observe/profiling/steps.py", "observe/profiling/comparison.py", "training/result.py"),
        *("observe/diagnosis/result.py", "observe/sources/training.py"),
        *("observe/dashboard/documents.py",),
    }
    figures = {
        *(names.STEP_TIME, names.INPUT_STALL, names.NOT_FINITE),
        *(names.TOKENS_RATE, names.EXAMPLES_RATE),
    }
    rooms = ("records", "training", "observe", "pods", "rehearsal")
    files = [path for path in FILES if path.relative_to(SOURCE).parts[0] in rooms]
    files = [path for path in files if str(path.relative_to(SOURCE)) not in others]
    assert homes_of(figures, files) == {name: {"records/names.py"} for name in figures}


def homes_of(texts, files):
    """Return the files in which each text is a literal."""
    homes = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in texts:
                homes.setdefault(node.value, set()).add(str(path.relative_to(SOURCE)))
    return homes


def test_a_class_name_means_one_thing():
    homes = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}
