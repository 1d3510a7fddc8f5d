"""The residual norm and its gradients, kernel and reference, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUKernelError
from tpukit.kernels.ops.residual_norm import PASSES, residual_norm

EPS = 1e-5
OPTIONS = {"reference": {"eps": EPS}, "triton": {"eps": EPS, "interpret": True}}


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
@pytest.mark.parametrize("name", OPTIONS)
def test_both_passes_against_float64(name, width):
    keys = jax.random.split(jax.random.key(0), 5)
    x, delta, d_stream, d_normed = (jax.random.normal(k, (64, width)) for k in keys[:4])
    scale = 1 + 0.1 * jax.random.normal(keys[4], (width,))
    passes, options = PASSES[name], OPTIONS[name]

    @jax.jit
    def both(x, delta, scale, d_stream, d_normed):
        out, kept = passes.forward(x, delta, scale, **options)
        return out, passes.backward(kept, (d_stream, d_normed), **options)

    (stream, normed), (d_x, d_delta, d_scale) = both(x, delta, scale, d_stream, d_normed)
    for found, wanted in zip(
        (stream, normed, d_x, d_scale), exact(x, delta, scale, d_stream, d_normed), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(d_x, d_delta)


def test_nothing_to_add():
    x, scale = jax.random.normal(jax.random.key(0), (32, 128)), jnp.ones(128)
    (stream, normed), _ = PASSES["triton"].forward(x, None, scale, **OPTIONS["triton"])
    np.testing.assert_array_equal(stream, x)
    np.testing.assert_allclose(normed, residual_norm(x, None, scale, eps=EPS)[1], rtol=1e-5)


def test_bfloat16_is_rounded_where_the_reference_rounds_it():
    keys = jax.random.split(jax.random.key(0), 2)
    x, delta = (jax.random.normal(k, (32, 128), jnp.bfloat16) for k in keys)
    (stream, _), _ = PASSES["triton"].forward(x, delta, jnp.ones(128), **OPTIONS["triton"])
    np.testing.assert_array_equal(stream, x + delta)


def test_shapes_and_names_are_checked():
    x, scale = jnp.ones((8, 4, 256)), jnp.ones(256)
    with pytest.raises(TPUKernelError, match=r"float32\[8, 4, 256\], but got float32\[8, 4, 255\]"):
        residual_norm(x, x[..., :-1], scale)
    with pytest.raises(TPUKernelError, match=r"a scale of the shape \(256,\), but got \(255,\)"):
        residual_norm(x, x, scale[:-1])
    with pytest.raises(TPUKernelError, match="Did you mean 'triton'"):
        residual_norm(x, x, scale, implementation="tritn")
