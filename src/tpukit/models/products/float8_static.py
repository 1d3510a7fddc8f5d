"""Matrix products in eight-bit floats as published TPU runs make them (MaxText's `fp8_full`).

| product | left operand | right operand |
|---|---|---|
| y = x W | x in e4m3 | W in e4m3 |
| dx = g Wᵀ | g times the scale of W, in e5m2, a scale for each row | W, as it was rounded forward |
| dW = xᵀ g | x, as it was rounded forward | g times the scale of x, in e5m2, one for each column |

With a `bound`, x and W have one constant scale, 0.5 for the usual 224: nobody reads an array for
its largest value, and a weight is rounded where it is stored, so that it crosses the links in
eight bits. What lies outside the bound is cut off, and its gradient is zero. Without a bound, x is
scaled by row and W by column, by the largest magnitudes of this very step.

A matrix that comes in e4m3 was rounded before, under the same scale, and is multiplied as it is: so
servers hold weights. It is a constant.

The numbers are those of qwix's `dot_general_qt`. That function keeps both wide operands for the
backward pass; this one keeps the rounded ones and which elements were cut off.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...hardware.formats import FLOAT8_E4M3FN, FLOAT8_E5M2
from ...kernels.rounding import Axes, quantize_channels, round_to_bound

STATIC_BOUND = 224.0  # of the published runs


class Rounded(NamedTuple):
    """An operand in e4m3, what its values are multiplied with, and which were not cut off."""

    values: jax.Array
    scales: jax.Array
    inside: jax.Array | None


def float8_static_matmul(
    x: jax.Array, matrix: jax.Array, *, bound: float = STATIC_BOUND
) -> jax.Array:
    """`x @ matrix` of x (..., K) and matrix (K, N), with a constant scale for both.

    Args:
        x: Activations.
        matrix: A weight of their dtype, or one of `held_weight`.
        bound: The largest magnitude that is kept; what lies outside it is cut off.
    """
    if is_held(matrix):
        return _forward(x, jax.lax.stop_gradient(matrix), bound)[0]
    return _matmul(x, matrix, bound)


def held_weight(matrix: jax.Array, *, bound: float = STATIC_BOUND) -> jax.Array:
    """A weight as `float8_static_matmul` multiplies it: e4m3, over the constant scale."""
    return round_to_bound(matrix, FLOAT8_E4M3FN, bound)


def is_held(matrix: jax.Array) -> bool:
    """Whether a weight was rounded before."""
    return matrix.dtype == FLOAT8_E4M3FN.name


def float8_channels_matmul(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """`x @ matrix` with a scale for each row of x and each column of the matrix, as they come."""
    return _matmul(x, matrix, None)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x: jax.Array, matrix: jax.Array, bound: float | None) -> jax.Array:
    return _forward(x, matrix, bound)[0]


def _forward(
    x: jax.Array, matrix: jax.Array, bound: float | None
) -> tuple[jax.Array, tuple[Rounded, Rounded]]:
    last = x.ndim - 1
    left, right = _rounded(x, bound, last, x.dtype), _rounded(matrix, bound, 0, x.dtype)
    y = _dot(left.values, right.values, ((last,), (0,)), x.dtype)
    return y * left.scales * right.scales.reshape(-1), (left, right)


def _backward(
    bound: float | None, kept: tuple[Rounded, Rounded], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    del bound
    left, right = kept
    last, tokens = gradient.ndim - 1, tuple(range(gradient.ndim - 1))
    # A scale of what is summed over can only stand on the other side, which is rounded anyway.
    rows, row_scales = _narrow(gradient * right.scales.reshape(-1), last)
    dx = _dot(rows, right.values, ((last,), (1,)), gradient.dtype) * row_scales
    columns, column_scales = _narrow(gradient * left.scales, tokens)
    dmatrix = _dot(left.values, columns, (tokens, tokens), gradient.dtype)
    return _masked(dx, left), _masked(dmatrix * column_scales.reshape(-1), right)


_matmul.defvjp(_forward, _backward)


def _rounded(operand: jax.Array, bound: float | None, axis: int, dtype: jnp.dtype) -> Rounded:
    if bound is None:
        return Rounded(*quantize_channels(operand, FLOAT8_E4M3FN, axis=axis), None)
    scale = jnp.full((1,) * operand.ndim, bound / FLOAT8_E4M3FN.largest, dtype)
    if is_held(operand):
        return Rounded(operand, scale, None)
    values = round_to_bound(operand, FLOAT8_E4M3FN, bound)
    return Rounded(values, scale, jnp.abs(operand) <= bound)


def _narrow(gradient: jax.Array, axis: Axes) -> tuple[jax.Array, jax.Array]:
    # Gradients need the range of e5m2, for which it gives one of e4m3's three bits of fraction.
    return quantize_channels(gradient, FLOAT8_E5M2, axis=axis)


def _masked(gradient: jax.Array, operand: Rounded) -> jax.Array:
    return gradient if operand.inside is None else jnp.where(operand.inside, gradient, 0)


def _dot(
    left: jax.Array,
    right: jax.Array,
    contracting: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: jnp.dtype,
) -> jax.Array:
    """Added up in float32, and as narrow as activations when it leaves: so devices exchange it."""
    return jax.lax.dot_general(left, right, (contracting, ((), ())), preferred_element_type=dtype)
