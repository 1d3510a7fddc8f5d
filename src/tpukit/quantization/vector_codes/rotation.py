"""The random Hadamard rotation: spreads outliers of a weight's rows over all of them.

R = H·diag(signs) with H orthogonal, so x·W = (x·Rᵀ)·(R·W). Where the width is no power of two, H is
block-diagonal, of the largest power of two that divides it.
"""

from functools import partial

import jax
import jax.numpy as jnp

from ...errors import TPUValidationError
from ...kernels.hadamard import block_size, hadamard

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


@partial(jax.jit, static_argnames="axis")
def rotate(x: jax.Array, signs: jax.Array, *, axis: int = 0) -> jax.Array:
    """R times the vectors along an axis, in x's dtype."""
    moved = jnp.moveaxis(x, axis, -1) * signs.astype(x.dtype)
    return jnp.moveaxis(hadamard(moved), -1, axis)


@partial(jax.jit, static_argnames="axis")
def rotate_back(x: jax.Array, signs: jax.Array, *, axis: int = 0) -> jax.Array:
    """Rᵀ times the vectors along an axis, which undoes `rotate`."""
    moved = hadamard(jnp.moveaxis(x, axis, -1)) * signs.astype(x.dtype)
    return jnp.moveaxis(moved, -1, axis)
