"""What a step and its compile do differently on one GPU, decided without one."""

import jax
import pytest

from tpukit.job import Job, build_step
from tpukit.step import workload
from tpukit.training import gpu


@pytest.mark.parametrize("here", [True, False])
def test_layers_are_unrolled_on_one_gpu_alone(monkeypatch, here):
    monkeypatch.setattr(gpu, "on_one_gpu", lambda: here)
    monkeypatch.setattr(workload, "on_one_gpu", lambda: here)
    job = Job(model="tiny", batch_size=2, sequence_length=16)
    assert build_step(job).work.execution.scan_layers is not here
    assert (gpu.compiler_options() is not None) is here
    asked = build_step(job.replace(parts={"scan_layers": True})).work
    assert asked.execution.scan_layers


def test_the_options_are_ones_that_jax_knows():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    assert lowered.compile(compiler_options=gpu.COMPILER_OPTIONS)(1.0) == 2.0
