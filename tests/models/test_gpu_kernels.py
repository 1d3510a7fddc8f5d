"""The kernels a GPU runs compute the same model: checked here by their meaning, on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.hardware.target import on_one_gpu, target_chip
from tpukit.step import Workload, workload


def step_with(monkeypatch, kernels: bool, **settings):
    monkeypatch.setattr(workload, "on_one_gpu", lambda: kernels)
    work = Workload("tiny", batch_size=4, sequence_length=32, **settings)
    state, metrics = jax.jit(work.train_step)(work.init(jax.random.key(0)), work.example_batch())
    return state.params, metrics


@pytest.mark.parametrize("scan_layers", [True, False])
def test_gpu_kernels_and_cut_stacks_change_nothing(monkeypatch, scan_layers):
    plain, measured = step_with(monkeypatch, False)
    params, metrics = step_with(monkeypatch, True, scan_layers=scan_layers)
    assert float(metrics["loss"]) == pytest.approx(float(measured["loss"]), rel=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(float(measured["grad_norm"]), rel=1e-5)
    for found, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_a_program_for_a_tpu_holds_no_gpu_kernel(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert on_one_gpu()
    with target_chip("v6e"):
        assert not on_one_gpu()


def test_the_kernels_lower_for_a_gpu_on_a_machine_without_one(monkeypatch):
    from tpukit.kernels.ops.gated_activation import gated_activation
    from tpukit.kernels.ops.residual_norm import residual_norm

    def loss(x, delta, scale):
        _, normed = residual_norm(x, delta, scale)
        return jnp.sum(gated_activation(normed).astype(jnp.float32))

    rows = jax.ShapeDtypeStruct((64, 1536), jnp.bfloat16)
    line = jax.ShapeDtypeStruct((1536,), jnp.float32)
    traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(rows, rows, line)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("residual_norm", "gated_activation"):
        assert f"{kernel}_forward" in text
        assert f"{kernel}_backward" in text
