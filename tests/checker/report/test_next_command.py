"""The command a check ends with is one that the command line takes, and says what was meant."""

import shlex
from importlib import import_module
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from tpukit.checker.fix import Fix, FixList
from tpukit.checker.next_command import command, next_command
from tpukit.cli import check, flags
from tpukit.errors import XLACompilationError
from tpukit.job import Job
from tpukit.step import Workload

JOB = Job.from_dict(
    {
        "model": "tiny",
        "on": "v6e-8",
        "batch_size": 16,
        "sequence_length": 32,
        "mesh": {"fsdp": 4, "tensor": -1},
        "remat": "save=qkv_proj offload=decoder_layer_input",
        "train": {"moment_dtype": "bfloat16", "z_loss": 1e-4},
        "options": {"xla_tpu_scoped_vmem_limit_kib": 32768, "xla_tpu_rwb_fusion": False},
    }
)


@pytest.fixture(autouse=True)
def own_cache():
    """None: the flags installed here are read from the cache of the whole suite, once."""


@pytest.fixture
def typed(monkeypatch):
    """Types a command and returns the job it describes, without compiling anything."""
    app = typer.Typer()
    app.command("check")(check.check)
    app.add_typer(flags.app, name="flags")
    seen = []

    def stop(job, **how):
        seen.append(job)
        raise XLACompilationError("stopped by the test")

    monkeypatch.setattr(import_module("tpukit.checker.check"), "compile_job", stop)
    monkeypatch.setattr("tpukit.checker.compiling.lower_job", stop)

    def run(text):
        words = shlex.split(text)
        assert words[0] == "tpukit"
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 4, result.output
        return seen.pop()

    return run


def checked(*, fits, fixes=None, prediction=None, **more):
    values = {"memory_only": False, "target": "", "asked": {}, "job": JOB, **more}
    found = None if fixes is None else FixList(tuple(fixes))
    compiled = SimpleNamespace(fits=fits)
    return SimpleNamespace(
        compiled=compiled, fixes=found, prediction=prediction, captured=None, **values
    )


def fix(fits=None, estimate=1, **changes):
    return Fix(changes=changes, cost="", estimate_bytes=estimate, usable_bytes=2, fits=fits)


def test_a_job_that_fits_is_tuned_as_it_is(typed):
    text = next_command(checked(fits=True, prediction=object()))
    assert text.startswith("tpukit flags tune tiny --on v6e-8 --batch-size 16")
    assert typed(text) == JOB


def test_one_without_a_step_time_gets_one(typed):
    text = next_command(checked(fits=True, memory_only=True))
    assert text.startswith("tpukit check tiny")
    assert typed(text) == JOB


def test_a_verified_fix_is_applied(typed):
    fixes = [
        fix(fits=False, remat="full"),
        fix(fits=True, mesh={"fsdp": 8}, **{"train.param_dtype": "bfloat16"}),
    ]
    job = typed(next_command(checked(fits=False, fixes=fixes)))
    assert job == JOB.replace({"train.param_dtype": "bfloat16"}, mesh={"fsdp": 8})


def test_estimates_are_verified_first():
    text = next_command(checked(fits=False, fixes=[fix(remat="full")]))
    assert text.endswith("--fix")


def test_an_estimate_is_tried_when_no_verified_fix_fits(typed):
    fixes = [fix(fits=False, remat="full"), fix(batch_size=8), fix(on="v6e-16")]
    text = next_command(checked(fits=False, fixes=fixes))
    assert typed(text) == JOB.replace(batch_size=8)


def test_without_any_fix_the_page_shows_what_takes_the_memory():
    asked = {"on": "v6e-1", "arg": ["f32[8,8]"], "donate": [0]}
    for fixes in (None, [fix(fits=False, remat="full")]):
        text = next_command(
            checked(fits=False, fixes=fixes, job=None, target="a.py:f", asked=asked)
        )
        assert text == (
            "tpukit check a.py:f --on v6e-1 --arg 'f32[8,8]' --donate 0 --html report.html"
        )


def test_what_was_typed_goes_before_what_a_file_says():
    text = next_command(
        checked(fits=True, prediction=object(), target="my job.yaml", asked={"remat": "none"})
    )
    assert text == "tpukit flags tune 'my job.yaml' --remat none"


def test_any_job_with_a_name_can_be_typed(typed):
    job = JOB.replace(model={"preset": "tiny", "n_layers": 1}, pipeline_schedule="gpipe")
    assert typed(next_command(checked(fits=True, job=job))) == job


def test_a_job_that_python_gave_its_model_has_no_command():
    work = Workload("tiny", batch_size=8, sequence_length=16)
    assert next_command(checked(fits=True, job=Job(model=work, on="v6e-8"))) == ""
    assert next_command(checked(fits=True, job=None)) == ""


def test_nothing_that_was_not_set_is_written():
    assert command("check", "tiny", {"on": "v6e-8", "options": {}, "arg": None}) == (
        "tpukit check tiny --on v6e-8"
    )
