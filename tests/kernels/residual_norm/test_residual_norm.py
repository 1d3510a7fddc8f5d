"""The residual norm and its gradients, kernel and reference, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUKernelError
from tpukit.kernels.residual_norm import gpu, reference, residual_norm

EPS = 1e-5


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
@pytest.mark.parametrize("passes", [reference, gpu], ids=["reference", "triton"])
def test_both_passes_against_float64(passes, width):
    keys = jax.random.split(jax.random.key(0), 5)
    x, delta, d_stream, d_normed = (jax.random.normal(k, (64, width)) for k in keys[:4])
    scale = 1 + 0.1 * jax.random.normal(keys[4], (width,))
    options = {"eps": EPS} | ({"interpret": True} if passes is gpu else {})
    (stream, normed), kept = passes.forward(x, delta, scale, **options)
    d_x, d_delta, d_scale = passes.backward(kept, (d_stream, d_normed), **options)
    for found, wanted in zip(
        (stream, normed, d_x, d_scale), exact(x, delta, scale, d_stream, d_normed), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(d_x, d_delta)


def test_nothing_to_add():
    x, scale = jax.random.normal(jax.random.key(0), (32, 128)), jnp.ones(128)
    (stream, normed), _ = gpu.forward(x, None, scale, eps=EPS, interpret=True)
    np.testing.assert_array_equal(stream, x)
    np.testing.assert_allclose(normed, residual_norm(x, None, scale, eps=EPS)[1], rtol=1e-5)


def test_gradients_through_the_public_function():
    x, scale = jax.random.normal(jax.random.key(0), (32, 128)), jnp.ones(128)

    def fused(x, delta, scale):
        stream, normed = residual_norm(x, delta, scale, eps=EPS)
        return jnp.sum(stream * normed)

    def plain(x, delta, scale):
        stream = x + delta
        mean = jnp.mean(stream**2, -1, keepdims=True)
        return jnp.sum(stream * stream * jax.lax.rsqrt(mean + EPS) * scale)

    for found, wanted in zip(
        jax.grad(fused, (0, 1, 2))(x, 0.5 * x, scale),
        jax.grad(plain, (0, 1, 2))(x, 0.5 * x, scale),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(TPUKernelError, match="triton"):
        residual_norm(jnp.ones((32, 128)), None, jnp.ones(128), implementation="tritn")
