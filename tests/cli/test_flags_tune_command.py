"""`tpukit flags tune` from the outside: what it prints and its exit codes."""

import json
import sys

import pytest
from trainers import ONE_STEP
from typer.testing import CliRunner

from tpukit.checker.flag_tuning import search as flag_search
from tpukit.cli import flags
from tpukit.cli.app import app
from tpukit.errors import ConfigError, TPUValidationError, XLACompilationError

FUNCTION = "import jax.numpy as jnp\ndef step(x):\n    return jnp.tanh(x @ x)\n"


@pytest.fixture
def tune(tmp_path):
    (tmp_path / "train.py").write_text(FUNCTION)
    target = [f"{tmp_path}/train.py:step", "--on", "v6e-1", "--arg", "bf16[256,256]"]
    return lambda *more: CliRunner().invoke(flags.app, ["tune", *target, *more])


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_a_function_is_tuned_within_its_budget(tune):
    result = tune("--budget", "2", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [trial["fits"] for trial in found["trials"]] == [True, True]
    assert found["trials"][1]["options"] == {
        "xla_tpu_enable_all_experimental_scheduler_features": True
    }
    assert found["trials"][1]["step_time_s"]["origin"] == "model"
    assert found["stopped"] == "the budget of 2 compiles is spent"
    assert "tuning" in result.stderr.splitlines()[0]
    assert "+ scheduler: experimental features" in result.stderr


def test_a_compiler_that_dies_is_no_answer(tune, monkeypatch):
    def die(*args, **how):
        raise XLACompilationError("the child was ended by SIGKILL")

    monkeypatch.setattr(flag_search, "run_request", die)
    result = tune()
    assert result.exit_code == 4
    assert "could not tell: the child was ended" in result.stderr


def test_what_is_no_job_is_refused():
    result = CliRunner().invoke(flags.app, ["tune", "tinny", "--on", "v6e-8"])
    assert isinstance(result.exception, TPUValidationError)
    assert "Did you mean 'tiny'" in str(result.exception)


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS")
    (tmp_path / "one.py").write_text(ONE_STEP)
    behind = ["--", sys.executable, "one.py"]
    return lambda *words: CliRunner().invoke(app, [*words, *behind])


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_a_program_of_others_is_tuned_as_it_is(program):
    done = program("flags", "tune", "--on", "v6e-8", "--budget", "2", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["program"], found["slice"]) == ("train_step", "v6e-8")
    assert [trial["fits"] for trial in found["trials"]] == [True, True]
    checked = json.loads(program("check", "--on", "v6e-8", "--keep", "kept", "--json").stdout)
    assert checked["memory"]["total_bytes"] == found["baseline"]["total_bytes"]["value"]
    kept = CliRunner().invoke(app, ["flags", "tune", "kept", "--budget", "2", "--json"])
    assert json.loads(kept.stdout)["trials"] == found["trials"]


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_flags_in_the_environment_do_what_the_search_tried(program, monkeypatch):
    words = ["--on", "v6e-8", "--json"]
    tried = json.loads(program("flags", "tune", "--budget", "2", *words).stdout)["trials"][1]
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in tried["options"].items())
    monkeypatch.setenv("LIBTPU_INIT_ARGS", flags)
    checked = json.loads(program("check", *words).stdout)
    assert checked["capture"]["libtpu_init_args"] == flags
    assert checked["memory"]["total_bytes"] == tried["total_bytes"]["value"]
    assert checked["prediction"]["step_time_s"] == pytest.approx(tried["step_time_s"]["value"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["tune", "tiny", "--on", "v6e-8", "--", "python"], "target is not for a command of yours"),
        (["tune", "--mesh", "fsdp=8", "--", "python"], "--mesh is not for a command of yours"),
        (["tune", "--", "python", "train.py"], "which slice"),
        (["tune", "--on", "v6e-8,v5e-8", "--", "python"], "expected one slice"),
        (["tune", "tiny", "--on", "v6e-8", "--program", "step"], "write it behind --"),
        (["tune", "--on", "v6e-8"], "what should be tuned"),
    ],
)
def test_what_does_not_go_together_is_refused(words, reason):
    done = CliRunner().invoke(flags.app, words)
    assert isinstance(done.exception, ConfigError)
    assert reason in str(done.exception)
