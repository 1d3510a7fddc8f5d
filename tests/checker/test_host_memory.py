"""What a check says of the memory of hosts."""

from dataclasses import replace

import pytest

import tpukit
from tpukit.checker.host_memory import USES, HostMemory
from tpukit.hardware import Figure, Slice
from tpukit.job import Job
from tpukit.step.host_memory import EXPORT_FILE_BYTES, HELD_WHILE_READ


def needs(on, **gigabytes):
    figures = {
        name: Figure(gigabytes.get(name, 0) * 10**9, "B", "model", "a test")
        for name in USES
        if name != "process"
    }
    return HostMemory(slice=Slice.parse(on), **figures)


def test_uses_that_come_together_are_added_up():
    found = needs("v6e-16", offloaded=100, input=1, saving=200, restoring=150, exporting=250)
    assert found.training.value == 301e9
    assert found.need.value == 301e9
    assert needs("v6e-16", saving=10, exporting=50).need.value == 50e9
    assert found.to_dict()["uses"]["saving"]["value"] == 200e9


def test_the_verdict_knows_the_host():
    """v6e hosts of four chips have 720 GB, of which a tenth is left alone."""
    assert needs("v6e-16", saving=640).fits is True
    too_much = needs("v6e-16", saving=660)
    assert too_much.fits is False
    assert "it would be killed. Use more hosts" in too_much.verdict
    assert needs("v6e-8", saving=660).fits is True  # one host of eight chips, with twice as much
    unknown = needs("v4-16", saving=660)
    assert unknown.fits is None
    assert "memory is not known: not in the public sources" in unknown.verdict


def test_what_nobody_knows_is_left_out_and_named():
    """A captured program's batch is in its process, and its checkpoints are its own."""
    known = needs("v6e-16", offloaded=100, input=1)
    unknown = Figure.missing("B", "its own")
    process = Figure(5 * 10**9, "B", "measured", "a test")
    found = replace(known, saving=unknown, restoring=unknown, exporting=unknown, process=process)
    assert found.need.value == 105e9
    assert found.fits is None
    assert "at least" in found.verdict
    assert "saving, restoring, exporting not counted" in found.verdict
    assert replace(found, offloaded=found.offloaded.scaled(10)).fits is False


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_a_check_counts_the_arrays_of_its_step(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path))
    job = Job(model="tiny", on="v5e-8", batch_size=8, sequence_length=32)
    result = tpukit.check(job, memory_only=True)
    found = result.host_memory
    parameters = tpukit.get_preset("tiny").parameter_count().total
    assert found.saving.value == pytest.approx(3 * 4 * parameters, rel=0.01)
    assert found.restoring.value == pytest.approx(HELD_WHILE_READ * found.saving.value, rel=0.01)
    assert 4 * parameters < found.exporting.value < 4 * parameters * 3 < EXPORT_FILE_BYTES
    assert found.fits
    assert result.to_dict()["host_memory"]["need"]["origin"] == "model"
    again = tpukit.check(job, memory_only=True)
    assert again.compiled.from_cache
    assert again.host_memory == found
    older = replace(result.compiled, facts=replace(result.compiled.facts, argument_bytes=()))
    assert replace(result, compiled=older).host_memory is None
