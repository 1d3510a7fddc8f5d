"""Frameworks that are installed for the test, each in an environment without tpukit and libtpu."""

import pytest
from captured import command_of
from framework_environments import framework_python
from installed_trainers import KERAS, LEVANTER_ROW, MAXTEXT_ROW, TUNIX

import tpukit

pytestmark = [pytest.mark.slow, pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # frameworks keep settings and caches there
    return tmp_path


def judged(words, on):
    """Return the verdict on a command whose step fits, and the one program of that step."""
    found = tpukit.check_program([str(word) for word in words], on)
    assert found.fits
    assert found.step_time_s > 0
    assert found.captured.peak_bytes < 4 * 2**30  # most of it are the framework's imports
    (step,) = found.captured.programs
    assert step.about.kind == "training step"
    assert {"parameters", "batch inputs"} <= set(step.program.facts.argument_purposes)
    return found, step


@pytest.mark.parametrize(
    ("name", "script"), [("keras", KERAS), ("tunix", TUNIX)], ids=["keras", "tunix"]
)
def test_a_script_of_a_framework_is_judged(name, script, folder):
    python = framework_python(name)
    path = folder / "train.py"
    path.write_text(script)
    _, step = judged([python, path], "v6e-8")
    assert step.devices == 8


def test_levanter_is_judged_by_its_own_trainer(folder, monkeypatch):
    command = command_of(LEVANTER_ROW, str(framework_python("levanter")), folder)
    for name, value in command.environment.items():
        monkeypatch.setenv(name, value)
    _, step = judged(command.words, LEVANTER_ROW["on"])
    assert step.devices == 4
    assert any("splash" in name for name in step.about.kernels)
    assert any(kind.startswith("i32[32") for kind in step.argument_types)
    assert not (folder / "checkpoints").exists()


def test_maxtext_is_judged_by_its_own_trainer(folder, monkeypatch):
    command = command_of(MAXTEXT_ROW, str(framework_python("maxtext")), folder)
    for name, value in command.environment.items():
        monkeypatch.setenv(name, value)
    found, step = judged(command.words, MAXTEXT_ROW["on"])
    assert step.devices == 8
    assert any("splash" in name for name in step.about.kernels)
    # MaxText adds a flag of its own to those in the environment.
    assert found.captured.libtpu_init_args.startswith(" ".join(MAXTEXT_ROW["flags"]))
