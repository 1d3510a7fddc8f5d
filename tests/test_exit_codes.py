"""Exit codes have names, in one enum; no number of another meaning stands elsewhere."""

import ast
from pathlib import Path

import pytest

from tpukit.exit_codes import ExitCode

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tpukit"
# It runs in a user's process, where tpukit may not be installed, and its parent reads no code.
SHIM = SOURCE / "capturing" / "shim"


def literal_exits(text: str) -> list[str]:
    """Calls of an exit function with a number, and constants that are named like an exit code."""
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(
                func=ast.Name(id="exit" | "SystemExit" | "Exit")
                | ast.Attribute(attr="exit" | "_exit" | "Exit"),
                args=[ast.Constant(value=int()), *_],
            ):
                found.append(ast.unparse(node))
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=int())):
                if name.strip("_") in ExitCode.__members__:
                    found.append(ast.unparse(node))
            case _:
                pass
    return found


def test_no_exit_code_is_a_literal_elsewhere():
    wrong = {
        str(path.relative_to(SOURCE)): exits
        for path in SOURCE.rglob("*.py")
        if path.name != "exit_codes.py"
        and not path.is_relative_to(SHIM)
        and (exits := literal_exits(path.read_text()))
    }
    assert not wrong


@pytest.mark.parametrize(
    "text",
    ["sys.exit(3)", "raise typer.Exit(1)", "os._exit(205)", "raise SystemExit(2)", "GAVE_UP = 6"],
)
def test_the_check_can_fail(text):
    assert literal_exits(text)


def test_each_meaning_has_the_documented_number():
    assert {name: int(code) for name, code in ExitCode.__members__.items()} == {
        "DONE": 0,
        "FAILED": 1,
        "BAD_INPUT": 2,
        "DOES_NOT_FIT": 3,
        "COULD_NOT_TELL": 4,
        "WORSE_THAN_BASELINE": 5,
        "DIVERGED": 3,
        "OUT_OF_MEMORY": 4,
        "NO_CAPACITY": 5,
        "GAVE_UP": 6,
        "INTERRUPTED": 130,
        "ABORTED": 134,
        "TERMINATED": 143,
        "HUNG": 200,
        "PEER_LOST": 201,
        "DIRTY_HOST": 202,
        "SETUP_FAILED": 203,
        "NOT_STARTED": 204,
        "STORAGE": 205,
        "SETUP_INTERRUPTED": 206,
    }
