"""The orthogonal Hadamard transform, by sums and differences: spreads outliers over a block.

For a width that is not a power of two it is block-diagonal, with blocks of the largest power of two
that divides the width.
"""

import jax
import jax.numpy as jnp


def block_size(width: int) -> int:
    """Return the largest power of two that divides a width."""
    return width & -width


def hadamard(x: jax.Array) -> jax.Array:
    """Transform blocks of the last axis, in x's dtype; applied twice it returns x."""
    width = x.shape[-1]
    block, shape = block_size(width), x.shape
    half = 1
    while half < block:
        pairs = x.reshape(*shape[:-1], -1, 2, half)
        left, right = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([left + right, left - right], axis=-2).reshape(shape)
        half *= 2
    return x * jnp.asarray(block**-0.5, x.dtype)
