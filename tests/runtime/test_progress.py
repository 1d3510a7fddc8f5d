"""Progress: one type of callback and one name for it, everywhere in the package."""

import ast
from pathlib import Path

import tpukit
from tpukit.runtime.progress import Counted, silent

SOURCE = Path(tpukit.__file__).parent
# A run's own view of itself, which is more than lines: see records/progress.py.
VIEWS = {"ProgressView", "bool | ProgressView"}


def test_a_counted_line_is_a_line_that_knows_how_far_it_is():
    lines = []
    lines.append(Counted("3 tokens", done=3, total=4))
    assert lines == ["3 tokens"]
    assert (lines[0].done, lines[0].total) == (3, 4)
    assert silent(lines[0]) is None


def test_every_parameter_that_hears_of_progress_has_the_one_type_and_name():
    types, others = set(), []
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
                name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
                written = ast.unparse(node.annotation).strip("'\"")
                if name == "progress":
                    types.add(written)
                elif "Callable[[str], None]" in written or written == "Progress":
                    others.append(f"{path.relative_to(SOURCE)}: {name}: {written}")
            # The alias itself is written once.
            if isinstance(node, ast.Assign) and "Callable[[str], None]" in ast.unparse(node.value):
                assert path == SOURCE / "runtime" / "progress.py"
    assert types - VIEWS == {"Progress"}
    assert others == []
