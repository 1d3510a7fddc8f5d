"""Matrix products in eight-bit floats: e4m3 forward, e5m2 for gradients, scaled as they come."""

from typing import Any

import jax
import jax.numpy as jnp

from ...hardware.formats import FLOAT8_E4M3FN, FLOAT8_E5M2, NumberFormat
from ...kernels.rounding import quantize


@jax.custom_vjp
def float8_matmul(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """`x @ matrix` of x (..., K) and matrix (K, N) of one dtype, both rounded to eight bits.

    Each operand is divided by its largest magnitude of this very step, so nothing overflows and
    nothing is carried between steps; sums are in float32, and the result has that dtype again.
    """
    return _forward(x, matrix)[0]


def _forward(x: jax.Array, matrix: jax.Array) -> tuple[jax.Array, Any]:
    narrow_x, narrow_matrix = _narrow(x), _narrow(matrix)
    y = _dot(narrow_x, narrow_matrix, ((x.ndim - 1,), (0,)), x.dtype)
    return y.astype(x.dtype), (narrow_x, narrow_matrix)


def _backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    narrow_x, narrow_matrix = kept
    # Gradients need the range of e5m2, for which it gives one of e4m3's three bits of fraction.
    narrow = _narrow(gradient, FLOAT8_E5M2)
    leading = tuple(range(gradient.ndim - 1))
    dx = _dot(narrow, narrow_matrix, ((gradient.ndim - 1,), (1,)), gradient.dtype)
    dmatrix = _dot(narrow_x, narrow, (leading, leading), gradient.dtype)
    return dx.astype(gradient.dtype), dmatrix.astype(gradient.dtype)


float8_matmul.defvjp(_forward, _backward)


def _narrow(values: jax.Array, format: NumberFormat = FLOAT8_E4M3FN) -> tuple[jax.Array, jax.Array]:
    """Values in eight bits, and the scale that all of them are multiplied with."""
    return quantize(values.astype(jnp.float32), format)


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
