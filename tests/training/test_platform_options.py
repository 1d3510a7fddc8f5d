"""What a step and its compile do differently on a GPU and on a CPU, decided without a GPU."""

import contextlib

import jax
import pytest
from jax._src import distributed

from tpukit.job import Job, build_step
from tpukit.step import workload
from tpukit.training import recompile


@pytest.mark.parametrize("here", [True, False])
def test_layers_are_unrolled_on_one_gpu_alone(monkeypatch, here):
    monkeypatch.setattr(recompile, "on_one_gpu", lambda: here)
    monkeypatch.setattr(workload, "on_one_gpu", lambda: here)
    job = Job(model="tiny", batch_size=2, sequence_length=16)
    assert build_step(job).work.execution.scan_layers is not here
    found = recompile.compiler_options()
    assert (found == recompile.GPU_OPTIONS) is here
    asked = build_step(job.replace(parts={"scan_layers": True})).work
    assert asked.execution.scan_layers


OPTIONS = [recompile.GPU_OPTIONS, recompile.SHARED_CPU_OPTIONS]


@pytest.mark.parametrize("options", OPTIONS, ids=["gpu", "cpu"])
def test_the_options_are_ones_that_jax_knows(options):
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    assert lowered.compile(compiler_options=options)(1.0) == 2.0


@pytest.mark.parametrize("devices", [1, 8])
def test_devices_that_share_a_cpu_keep_the_order_of_collectives(monkeypatch, devices):
    monkeypatch.setattr(jax, "local_device_count", lambda: devices)
    shared = recompile.SHARED_CPU_OPTIONS if devices > 1 else None
    assert recompile.compiler_options() == shared


@pytest.mark.parametrize(("processes", "inside"), [(4, 0), (1, 3)])
def test_every_process_of_several_counts_as_the_first_while_it_compiles(
    monkeypatch, processes, inside
):
    monkeypatch.setattr(distributed.global_state, "process_id", 3)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    with contextlib.suppress(ValueError), recompile.keeping_own_programs():
        assert distributed.global_state.process_id == inside
        raise ValueError
    assert distributed.global_state.process_id == 3
