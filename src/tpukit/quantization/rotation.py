"""The random Hadamard rotation: spreads outliers of a weight's rows over all of them.

R = H·diag(signs) with H orthogonal, so x·W = (x·Rᵀ)·(R·W). Where the width is no power of two, H is
block-diagonal, of the largest power of two that divides it.
"""

from functools import partial

import jax
import jax.numpy as jnp

from ..errors import TPUValidationError

# Below this a block mixes too few rows to be worth anything.
_LEAST_BLOCK = 8


def random_signs(width: int, seed: int) -> jax.Array:
    """int8 (width,) of ±1.

    Raises:
        TPUValidationError: The width has too small a power of two in it.
    """
    if block_size(width) < _LEAST_BLOCK:
        raise TPUValidationError(
            f"A Hadamard rotation of {width} rows mixes blocks of {block_size(width)}; the width "
            f"must be a multiple of {_LEAST_BLOCK}. Leave hadamard out for this matrix."
        )
    return jax.random.rademacher(jax.random.key(seed), (width,), jnp.int8)


def block_size(width: int) -> int:
    """The largest power of two that divides a width."""
    return width & -width


@partial(jax.jit, static_argnames="axis")
def rotate(x: jax.Array, signs: jax.Array, *, axis: int = 0) -> jax.Array:
    """R times the vectors along an axis, in x's dtype."""
    moved = jnp.moveaxis(x, axis, -1) * signs.astype(x.dtype)
    return jnp.moveaxis(_hadamard(moved), -1, axis)


@partial(jax.jit, static_argnames="axis")
def rotate_back(x: jax.Array, signs: jax.Array, *, axis: int = 0) -> jax.Array:
    """Rᵀ times the vectors along an axis, which undoes `rotate`."""
    moved = _hadamard(jnp.moveaxis(x, axis, -1)) * signs.astype(x.dtype)
    return jnp.moveaxis(moved, -1, axis)


def _hadamard(x: jax.Array) -> jax.Array:
    """The orthogonal Hadamard transform of blocks of the last axis, by sums and differences."""
    width = x.shape[-1]
    block, shape = block_size(width), x.shape
    half = 1
    while half < block:
        pairs = x.reshape(*shape[:-1], -1, 2, half)
        left, right = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([left + right, left - right], axis=-2).reshape(shape)
        half *= 2
    return x * jnp.asarray(block**-0.5, x.dtype)
