"""The residual norm and its gradients, kernel and reference, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tpukit.kernels.ops.residual_norm import pallas_tpu, reference, triton_gpu
from tpukit.kernels.ops.residual_norm.api import residual_norm
from tpukit.kernels.ops.rms_norm.blocks import RowBlocks

EPS = 1e-5
STRICT = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2
)
OPTIONS = {
    reference: {"eps": EPS},
    triton_gpu: {"eps": EPS, "interpret": True},
    pallas_tpu: {"eps": EPS, "interpret": STRICT, "blocks": RowBlocks(16)},
}


def exact(x, delta, scale, d_stream, d_normed):
    """Everything in float64 by the textbook formula."""
    x, delta, scale, d_stream, d_normed = (
        np.asarray(a, np.float64) for a in (x, delta, scale, d_stream, d_normed)
    )
    stream = x + delta
    inverse = 1 / np.sqrt(np.mean(stream**2, -1, keepdims=True) + EPS)
    unit, weighted = stream * inverse, d_normed * scale
    d_x = d_stream + (weighted - unit * np.mean(weighted * unit, -1, keepdims=True)) * inverse
    return stream, unit * scale, d_x, np.sum(d_normed * unit, axis=0)


@pytest.mark.parametrize("width", [128, 384])  # 384 is no power of two
@pytest.mark.parametrize("passes", OPTIONS, ids=["reference", "triton", "pallas_tpu"])
def test_both_passes_against_float64(passes, width, no_races):
    keys = jax.random.split(jax.random.key(0), 5)
    rows = 53 if passes is pallas_tpu else 64  # a TPU has rows left over, a GPU refuses them
    x, delta, d_stream, d_normed = (jax.random.normal(k, (rows, width)) for k in keys[:4])
    scale = 1 + 0.1 * jax.random.normal(keys[4], (width,))
    options = OPTIONS[passes]

    @jax.jit
    def both(x, delta, scale, d_stream, d_normed):
        out, kept = passes.forward(x, delta, scale, **options)
        return out, passes.backward(kept, (d_stream, d_normed), **options)

    with no_races():
        (stream, normed), (d_x, d_delta, d_scale) = both(x, delta, scale, d_stream, d_normed)
    for found, wanted in zip(
        (stream, normed, d_x, d_scale), exact(x, delta, scale, d_stream, d_normed), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(d_x, d_delta)


@pytest.mark.parametrize("passes", [triton_gpu, pallas_tpu], ids=["triton", "pallas_tpu"])
def test_nothing_to_add(passes):
    x, scale = jax.random.normal(jax.random.key(0), (32, 128)), jnp.ones(128)
    (stream, normed), _ = passes.forward(x, None, scale, **OPTIONS[passes])
    np.testing.assert_array_equal(stream, x)
    np.testing.assert_allclose(normed, residual_norm(x, None, scale, eps=EPS)[1], rtol=1e-5)


def test_bfloat16_is_rounded_where_the_reference_rounds_it():
    keys = jax.random.split(jax.random.key(0), 2)
    x, delta = (jax.random.normal(k, (32, 128), jnp.bfloat16) for k in keys)
    (stream, _), _ = pallas_tpu.forward(x, delta, jnp.ones(128), **OPTIONS[pallas_tpu])
    np.testing.assert_array_equal(stream, x + delta)
