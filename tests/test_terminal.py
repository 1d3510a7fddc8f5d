"""What is shown keeps its brackets: no text of ours is markup, and no console reads any."""

import ast
import re
from pathlib import Path

import pytest
from rich.console import Group
from rich.table import Table

import tpukit
from tpukit.cli.output import show
from tpukit.errors import MissingExtraError
from tpukit.kernels.timing.bench import BenchRow, KernelBench
from tpukit.terminal import open_console

SOURCES = sorted(Path(tpukit.__file__).parent.rglob("*.py"))
HOME = Path("tpukit", "terminal.py")
# `[/]`, `[/bold]`, `[bold red]text`: how marks in a string end or begin.
MARKS = re.compile(r"\[/[a-z ]*\]|\[(?:bold|dim|italic|red|green|yellow|blue|cyan)[a-z ]*\]")


def calls_of(tree, name):
    """Calls of a name, or of an attribute of that name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            if name in (getattr(called, "id", None), getattr(called, "attr", None)):
                yield node


def test_only_one_place_opens_consoles_and_columns_of_text():
    for file in SOURCES:
        if file.parts[-2:] != HOME.parts:
            tree = ast.parse(file.read_text())
            for name in ("Console", "TextColumn", "from_markup"):
                found = [f"{file}:{call.lineno}" for call in calls_of(tree, name)]
                assert not found, f"{name}(…) in {found}: use tpukit/terminal.py"


def test_no_string_is_written_as_markup():
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                is_text_about_it = file.parts[-2:] == HOME.parts
                assert is_text_about_it or not MARKS.search(node.value), f"{file}:{node.lineno}"


class Shown:
    def __init__(self, part):
        self.part = part

    def __rich__(self):
        return self.part


def table(*cells):
    made = Table("head[er]", box=None)
    for cell in cells:
        made.add_row(cell)
    return made


@pytest.mark.parametrize(
    "text",
    ["pip install 'tpukit[tpu]'", "bf16[8,128]", "[red] and [/]", "a :warning: b", "[0]['layers']"],
)
@pytest.mark.parametrize("part", [str, lambda text: Group(text), table])
def test_brackets_are_shown(text, part, capsys):
    show(Shown(part(text)))
    assert text in capsys.readouterr().out


def test_a_bench_without_libtpu_names_the_extra_to_install(capsys):
    error = MissingExtraError("tpu", needed_for="The offline TPU compiler", module="libtpu")
    row = BenchRow("case", "v6e", "pallas_tpu", None, str(error))
    show(KernelBench("op", "forward", (row,)))
    shown = "".join(capsys.readouterr().out.split())
    assert "pipinstall'tpukit[tpu]'" in shown


def test_a_status_and_a_bar_show_brackets_too():
    from rich.progress import Progress
    from rich.text import Text

    from tpukit.terminal import text_column

    console = open_console(force_terminal=True, width=80, record=True)
    with console.status(Text("lower f[tpu]")):
        pass
    with Progress(text_column("{task.description}"), console=console) as bars:
        bars.add_task("lower f[tpu]")
    assert "lower f[tpu]" in console.export_text()
