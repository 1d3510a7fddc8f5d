"""Every result is short in a traceback, whole in a terminal and styled in a notebook."""

import ast
import inspect
import sys
from dataclasses import dataclass, field
from enum import Enum
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter

from tpukit import (
    MemoryOptimizer,
    Slice,
    TPUConfig,
    check,
    check_decoding,
    get_chip,
    plan,
    rehearse,
    tune_flags,
)
from tpukit.cli.output import Written, show
from tpukit.hardware import Figure
from tpukit.hardware.missing import Missing
from tpukit.job import Job
from tpukit.pods import PodConfig
from tpukit.quantization import quantize_model
from tpukit.runtime.progress import watched
from tpukit.shown import LONGEST_REPR, Facts, Shown

SOURCE = Path(__file__).parents[1] / "src" / "tpukit"
# A protocol, and a number whose text must stay that of a number.
EXCEPTIONS = {"Presentable", "OptimalBatchSize"}


def classes():
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
                methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                yield node.name, bases, methods


def test_every_class_that_a_terminal_shows_is_shown_everywhere():
    bases_of = {}
    for name, bases, _ in classes():
        bases_of.setdefault(name, set()).update(bases)

    def is_shown(name, seen=()):
        return name == "Shown" or any(
            is_shown(base, (*seen, name)) for base in bases_of.get(name, ()) if base not in seen
        )

    rich = {name for name, _, methods in classes() if "__rich__" in methods}
    assert len(rich) > 90
    assert {name for name in rich if not is_shown(name)} == EXCEPTIONS


@pytest.fixture(scope="module")
def planned():
    return plan("llama3.1-8b", tokens=1e9, on="v6e", verify=0)


@pytest.fixture(scope="module")
def results(planned):
    return [
        planned,
        planned.best,
        planned.best.job,
        MemoryOptimizer().estimate_memory("tiny", 4, 64),
        TPUConfig(tpu_version="v6e", num_chips=8),
        TPUConfig().setup_environment_variables({}, platform="cpu"),
        Slice.parse("v6e-8"),
        get_chip("v6e"),
        PodConfig(tpu_type="v6e-8"),
    ]


def test_a_repr_is_one_short_line(results):
    for result in results:
        assert len(repr(result)) <= LONGEST_REPR + 60, repr(result)
        assert "\n" not in repr(result)
        assert repr(result).startswith((type(result).__name__, "get_chip"))


def test_the_text_is_what_a_terminal_shows(planned, capsys):
    show(planned)
    shown = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
    assert str(planned).splitlines() == shown
    assert "llama3.1-8b" in str(planned)


def test_a_notebook_shows_html_and_a_short_text(planned):
    data, _ = DisplayFormatter().format(planned)
    assert data["text/html"].startswith("<pre")
    assert "llama3.1-8b" in data["text/html"]
    data, _ = DisplayFormatter().format(PodConfig(tpu_type="v6e-8"))
    assert data == {"text/plain": "PodConfig(tpu_type='v6e-8')"}


def test_html_is_escaped():
    html = Written((Path("<script>x</script>"),))._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


@dataclass(frozen=True)
class Part(Shown):
    number: int
    text: str = "as usual"


@dataclass(frozen=True, slots=True)
class Disk(Facts):
    path: Path
    used: float | Missing
    parts: tuple[Part, ...] = ()
    labels: dict = field(default_factory=dict)


class Origin(Enum):
    MEASURED = "measured"


@dataclass(frozen=True)
class Listed(Facts):
    disks: tuple[Disk, ...]
    origin = Origin.MEASURED
    _facts = ("origin", ("how_many", "count"))

    @property
    def count(self):
        return len(self.disks)


def test_plain_data_are_the_fields_or_the_names_that_a_class_lists():
    disk = Disk(Path("a/b"), Missing("no disk"), (Part(1),), {"x": (1, None)})
    assert disk.to_dict() == {
        "path": "a/b",
        "used": None,
        "parts": [{"number": 1, "text": "as usual"}],
        "labels": {"x": [1, None]},
    }
    assert list(disk.to_dict()) == ["path", "used", "parts", "labels"]
    assert Listed((disk,)).to_dict() == {"origin": "measured", "how_many": 1}


@dataclass(frozen=True)
class Whole(Shown):
    parts: tuple[Part, ...]
    where: Slice
    speed: Figure
    weights: np.ndarray
    by_name: dict[str, int]
    note: str
    nothing: Missing
    hidden: str = field(default="secret", repr=False)


def test_fields_are_named_by_kind_and_number():
    whole = Whole(
        (Part(1), Part(2)),
        Slice.parse("v6e-8"),
        Figure(2.5, "s", "measured", "a run"),
        np.ones((3, 4), np.float32),
        {"a": 1},
        "x" * 400,
        Missing("no TPU"),
    )
    text = repr(whole)
    assert text.startswith(
        "Whole(parts=[2 Part], where=v6e-8, speed=2.5 s (measured), weights=float32[3, 4], "
    )
    assert "by_name={'a': 1}" in text
    assert "secret" not in text
    assert repr(Part(1)) == str(Part(1)) == "Part(number=1)"
    assert Part(1)._repr_html_() is None


def test_a_secret_of_the_environment_is_in_no_repr():
    job = Job.of("tiny", launch={"environment": {"TOKEN": "hunter2"}})
    for shown in (repr(job), str(job), job._repr_html_(), repr(job.launch)):
        assert "hunter2" not in shown


@pytest.mark.parametrize("is_terminal", [True, False])
def test_python_shows_progress_where_somebody_watches(monkeypatch, is_terminal):
    written = StringIO()
    written.isatty = lambda: is_terminal
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.delitem(sys.modules, "ipykernel.kernelapp", raising=False)
    watched("compiling")
    assert written.getvalue() == ("compiling\n" if is_terminal else "")


def test_a_notebook_shows_progress(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", object())
    watched("compiling")
    assert capsys.readouterr() == ("compiling\n", "")


@pytest.mark.parametrize(
    "slow", [check, check_decoding, plan, quantize_model, rehearse, tune_flags]
)
def test_what_takes_a_while_shows_its_progress(slow):
    assert inspect.signature(slow).parameters["progress"].default is watched
