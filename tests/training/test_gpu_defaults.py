"""What a trainer does differently on one GPU, decided without one."""

import jax
import pytest

from tpukit.models import get_preset
from tpukit.training import gpu
from tpukit.training.preparation import ModelChoice


@pytest.mark.parametrize("here", [True, False])
def test_layers_are_unrolled_on_one_gpu_alone(monkeypatch, here):
    monkeypatch.setattr(gpu, "on_one_gpu", lambda: here)
    choice = ModelChoice(model=get_preset("tiny"), compute_dtype="bfloat16", options={})
    work = choice.workload(batch_size=2, sequence_length=16)
    assert work.scan_layers is not here
    assert (gpu.compiler_options() is not None) is here
    asked = ModelChoice(
        model=get_preset("tiny"), compute_dtype="bfloat16", options={"scan_layers": True}
    )
    assert asked.workload(batch_size=2, sequence_length=16).scan_layers


def test_the_options_are_ones_that_jax_knows():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    assert lowered.compile(compiler_options=gpu.COMPILER_OPTIONS)(1.0) == 2.0
