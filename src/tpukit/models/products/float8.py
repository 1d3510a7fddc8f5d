"""Matrix products in eight-bit floats: e4m3 forward, e5m2 for gradients, scaled as they come."""

from typing import Any

import jax
import jax.numpy as jnp

# e4m3 holds three bits of fraction, which values need; e5m2 gives one of them for the range that
# gradients need.
FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


@jax.custom_vjp
def float8_matmul(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """`x @ matrix` of x (..., K) and matrix (K, N) of one dtype, both rounded to eight bits.

    Each operand is divided by its largest magnitude of this very step, so nothing overflows and
    nothing is carried between steps; sums are in float32, and the result has that dtype again.
    """
    return _forward(x, matrix)[0]


def _forward(x: jax.Array, matrix: jax.Array) -> tuple[jax.Array, Any]:
    narrow_x, narrow_matrix = _narrow(x, FORWARD), _narrow(matrix, FORWARD)
    y = _dot(narrow_x, narrow_matrix, ((x.ndim - 1,), (0,)), x.dtype)
    return y.astype(x.dtype), (narrow_x, narrow_matrix)


def _backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    narrow_x, narrow_matrix = kept
    narrow = _narrow(gradient, BACKWARD)
    leading = tuple(range(gradient.ndim - 1))
    dx = _dot(narrow, narrow_matrix, ((gradient.ndim - 1,), (1,)), gradient.dtype)
    dmatrix = _dot(narrow_x, narrow, (leading, leading), gradient.dtype)
    return dx.astype(gradient.dtype), dmatrix.astype(gradient.dtype)


float8_matmul.defvjp(_forward, _backward)


def _narrow(values: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Values in eight bits, and what they are to be multiplied with."""
    wide = values.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), initial=0.0)
    scale = jnp.where(largest > 0, largest / float(jnp.finfo(dtype).max), 1.0)
    return (wide / scale).astype(dtype), scale


def _dot(
    left: tuple[jax.Array, jax.Array],
    right: tuple[jax.Array, jax.Array],
    contracting: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: Any,
) -> jax.Array:
    """Added up in float32, and as narrow as activations when it leaves: so devices exchange it."""
    product = jax.lax.dot_general(
        left[0], right[0], (contracting, ((), ())), preferred_element_type=dtype
    )
    return product * (left[1] * right[1])
