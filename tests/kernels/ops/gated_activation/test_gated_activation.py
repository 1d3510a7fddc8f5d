"""The gated activation and its gradient against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tpukit.errors import TPUKernelError
from tpukit.kernels.ops.gated_activation import pallas_tpu, reference, triton_gpu
from tpukit.kernels.ops.gated_activation.api import gated_activation
from tpukit.kernels.ops.rms_norm.blocks import RowBlocks

STRICT = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2
)
OPTIONS = {
    reference: {},
    triton_gpu: {"interpret": True},
    pallas_tpu: {"interpret": STRICT, "blocks": RowBlocks(8)},  # two blocks, one row left over
}


@pytest.mark.parametrize("width", [256, 768])
@pytest.mark.parametrize("passes", OPTIONS, ids=["reference", "triton", "pallas_tpu"])
def test_gradients_against_float64(passes, width, no_races):
    both = 3 * jax.random.normal(jax.random.key(0), (3, 5, 2 * width))
    d = jax.random.normal(jax.random.key(1), (3, 5, width))
    with no_races():
        (d_both,) = jax.jit(lambda *a: passes.backward(*a, **OPTIONS[passes]))(both, d)
    (g, v), c = np.split(np.asarray(both, np.float64), 2, axis=-1), np.asarray(d, np.float64)
    share = 1 / (1 + np.exp(-g))
    wanted = np.concatenate([c * v * (share + g * share * (1 - share)), c * g * share], axis=-1)
    np.testing.assert_allclose(d_both, wanted, rtol=1e-5, atol=1e-5)


def test_the_kernel_of_a_tpu_rounds_once(no_races):
    both = jax.random.normal(jax.random.key(0), (40, 512), jnp.bfloat16)
    d = jax.random.normal(jax.random.key(1), (40, 256), jnp.bfloat16)
    with no_races():
        (found,) = jax.jit(lambda *a: pallas_tpu.backward(*a, interpret=STRICT))(both, d)
    np.testing.assert_allclose(
        np.asarray(found, np.float32),
        np.asarray(reference.backward(both, d)[0], np.float32),
        rtol=1e-2,
        atol=1e-3,
    )


def test_narrow_rows_are_left_to_xla():
    assert triton_gpu.fits(jnp.ones((1, 2 * 8192)))
    assert not triton_gpu.fits(jnp.ones((1, 2 * 1000)))
    assert pallas_tpu.fits(jnp.ones((1, 2 * 128)), "v5e")
    assert not pallas_tpu.fits(jnp.ones((1, 2 * 1000)), "v5e")
    with pytest.raises(TPUKernelError, match=r"whole 128 lanes .* got float32\[1, 2000\]"):
        gated_activation(jnp.ones((1, 2 * 1000)), implementation="pallas_tpu")
