"""Queries and keys out of one array: the kernel and XLA's way, against `rope` in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.kernels.ops.rope import rotate
from tpukit.kernels.ops.rope_apart import PASSES, has_kernel


@pytest.fixture
def in_float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (5, 5)])
@pytest.mark.parametrize("kernel", [True, False], ids=["triton", "reference"])
def test_both_directions_agree_with_turning_each(heads, kernel):
    head_dim, shape = 32, (2, 6)
    keys = jax.random.split(jax.random.key(0), 4)
    joined = jax.random.normal(keys[0], (*shape, sum(heads) * head_dim), jnp.float64)
    angles = jax.random.normal(keys[1], (*shape, head_dim // 2), jnp.float64)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    passes = PASSES["triton" if kernel else "reference"]
    options = {"heads": heads, **({"interpret": True} if kernel else {})}

    def each(joined):
        q, k = jnp.split(joined, [heads[0] * head_dim], axis=-1)
        return tuple(
            rotate(x.reshape(*shape, count, head_dim), cos, sin)
            for x, count in zip((q, k), heads, strict=True)
        )

    wanted, pull = jax.vjp(each, joined)
    found, residuals = jax.jit(partial(passes.forward, **options))(joined, cos, sin)
    cotangent = tuple(
        jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys[2:], wanted, strict=True)
    )
    gradient, *nothing = jax.jit(partial(passes.backward, **options))(residuals, cotangent)
    for one, other in zip((*found, gradient), (*wanted, *pull(cotangent)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert nothing == [None, None]


def test_the_kernel_takes_powers_of_two():
    assert has_kernel(64, 128)
    assert not has_kernel(64, 96)
    assert not has_kernel(63, 128)
