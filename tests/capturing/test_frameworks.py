"""Trainers of other frameworks, unmodified, up to the verdict of the real compiler."""

import sys

import pytest
from framework_trainers import FRAMEWORKS

import tpukit

pytestmark = [pytest.mark.slow, pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_step_of_a_trainer_is_judged(name, tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    script = tmp_path / f"{name}_train.py"
    script.write_text(FRAMEWORKS[name])
    found = tpukit.check_program([sys.executable, str(script)], "v6e-8")
    assert found.fits
    assert found.step_time_s > 0
    (step,) = found.captured.programs
    assert step.about.kind == "training step"
    assert {"parameters", "batch inputs"} <= set(step.program.facts.argument_purposes)
    if name == "kernel":
        assert any(one.kind == "kernel" and "double" in one.evidence for one in found.findings)
    if name in ("linen", "nnx", "equinox", "torchax"):  # one device of eight computes
        assert any(one.kind == "idle devices" for one in found.findings)
    assert found.captured.peak_bytes < 2 * 2**30
