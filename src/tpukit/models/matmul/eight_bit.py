"""Matmuls of activations and weights in 8-bit formats, forward and backward.

The three matmuls of a linear layer are y = x W, dx = g Wᵀ and dW = xᵀ g. A scale can be taken out
of a sum only if it is not summed over. In dx the scales of W's columns are summed over, so they are
multiplied into g, which is rounded anyway; W is then rounded and gathered only once.

| function | x and W | g |
|---|---|---|
| `float8_matmul` | e4m3, one scale per operand and step | e5m2, one scale |
| `float8_channels_matmul` | e4m3, scales per row of x and column of W | e5m2, per row and column |
| `float8_static_matmul` | e4m3, one constant scale | e5m2, per row and column |
| `int8_matmul` | int8, scales per row of x and column of W | int8 per row for dx, wide for dW |
| `int8_matmul_throughout` | the same | int8 per row for dx and per column for dW |

`float8_static_matmul` is what published TPU runs use (MaxText's `fp8_full`). No array is read for
its largest value, and a weight is rounded where it is stored, so it crosses the links in 8 bits.
Values outside the bound are clipped, and their gradient is zero. The numbers are those of qwix's
`dot_general_qt`, which keeps both wide operands for the backward pass; here the rounded operands
and a mask of the clipped elements are kept.

`int8_matmul` leaves dW as wide as activations. It is summed over tokens, whose gradients differ by
orders of magnitude, and int8 makes it hardly faster: contracted over rows it takes as long as in
bfloat16 on v5e and v5p, and on v6e it saves about what two more roundings cost.
`int8_matmul_throughout` rounds it too, x and g by column, as MaxText's recipes do.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...hardware.formats import FLOAT8_E4M3FN, FLOAT8_E5M2, INT8
from ...kernels.rounding import (
    Axes,
    absmax_scales,
    quantize,
    quantize_channels,
    round_to_bound,
    to_nearest,
)

STATIC_BOUND = 224.0  # of the published runs; the scale is then 0.5

Contracting = tuple[tuple[int, ...], tuple[int, ...]]
# Values in a narrow format, and the scale they are multiplied with.
Scaled = tuple[jax.Array, jax.Array]


class Rounded(NamedTuple):
    """An operand in e4m3, its scales, and a mask of the elements that were not clipped."""

    values: jax.Array
    scales: jax.Array
    inside: jax.Array | None


@jax.custom_vjp
def float8_matmul(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Return `x @ matrix` of x (..., K) and matrix (K, N), both rounded to e4m3.

    Each operand is divided by its largest magnitude of this step, so nothing overflows and nothing
    is carried between steps. Sums are in float32, and the result has the operands' dtype.
    """
    return _float8_forward(x, matrix)[0]


def _float8_forward(x: jax.Array, matrix: jax.Array) -> tuple[jax.Array, tuple[Scaled, Scaled]]:
    left = quantize(x.astype(jnp.float32), FLOAT8_E4M3FN)
    right = quantize(matrix.astype(jnp.float32), FLOAT8_E4M3FN)
    y = _scaled_dot(left, right, ((x.ndim - 1,), (0,)), x.dtype)
    return y.astype(x.dtype), (left, right)


def _float8_backward(
    kept: tuple[Scaled, Scaled], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    left, right = kept
    # Gradients need the range of e5m2, which has one fraction bit less than e4m3.
    narrow = quantize(gradient.astype(jnp.float32), FLOAT8_E5M2)
    leading = tuple(range(gradient.ndim - 1))
    dx = _scaled_dot(narrow, right, ((gradient.ndim - 1,), (1,)), gradient.dtype)
    dmatrix = _scaled_dot(left, narrow, (leading, leading), gradient.dtype)
    return dx.astype(gradient.dtype), dmatrix.astype(gradient.dtype)


float8_matmul.defvjp(_float8_forward, _float8_backward)


def float8_static_matmul(
    x: jax.Array, matrix: jax.Array, *, bound: float = STATIC_BOUND
) -> jax.Array:
    """Return `x @ matrix` of x (..., K) and matrix (K, N), with a constant scale for both.

    Args:
        x: Activations.
        matrix: A weight of the activations' dtype, or a constant one from `held_weight`, which is
            multiplied as it is stored.
        bound: The largest magnitude that is kept; larger values are clipped.
    """
    if is_held(matrix):
        return _channels_forward(x, jax.lax.stop_gradient(matrix), bound)[0]
    return _channels_matmul(x, matrix, bound)


def held_weight(matrix: jax.Array, *, bound: float = STATIC_BOUND) -> jax.Array:
    """Return a weight in e4m3 over the constant scale, as `float8_static_matmul` multiplies it."""
    return round_to_bound(matrix, FLOAT8_E4M3FN, bound)


def is_held(matrix: jax.Array) -> bool:
    """Whether a weight is stored in e4m3 already."""
    return matrix.dtype == FLOAT8_E4M3FN.name


def float8_channels_matmul(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Return `x @ matrix` with one scale per row of x and per column of the matrix."""
    return _channels_matmul(x, matrix, None)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _channels_matmul(x: jax.Array, matrix: jax.Array, bound: float | None) -> jax.Array:
    return _channels_forward(x, matrix, bound)[0]


def _channels_forward(
    x: jax.Array, matrix: jax.Array, bound: float | None
) -> tuple[jax.Array, tuple[Rounded, Rounded]]:
    last = x.ndim - 1
    left, right = _clipped(x, bound, last, x.dtype), _clipped(matrix, bound, 0, x.dtype)
    y = _dot(left.values, right.values, ((last,), (0,)), x.dtype)
    return y * left.scales * right.scales.reshape(-1), (left, right)


def _channels_backward(
    bound: float | None, kept: tuple[Rounded, Rounded], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    del bound
    left, right = kept
    last, tokens = gradient.ndim - 1, tuple(range(gradient.ndim - 1))
    rows, row_scales = quantize_channels(
        gradient * right.scales.reshape(-1), FLOAT8_E5M2, axis=last
    )
    dx = _dot(rows, right.values, ((last,), (1,)), gradient.dtype) * row_scales
    columns, column_scales = quantize_channels(gradient * left.scales, FLOAT8_E5M2, axis=tokens)
    dmatrix = _dot(left.values, columns, (tokens, tokens), gradient.dtype)
    return _masked(dx, left), _masked(dmatrix * column_scales.reshape(-1), right)


_channels_matmul.defvjp(_channels_forward, _channels_backward)


@jax.custom_vjp
def int8_matmul(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Return `x @ matrix` of x (..., K) and matrix (K, N), both rounded to int8.

    Scales are the largest magnitudes of this step, so nothing overflows and nothing is carried
    between steps. The result has the operands' dtype. An int32 holds the sum of 133,000 products of
    the largest values, more than any K in use.
    """
    return _int8_forward(x, matrix)[0]


def _int8_forward(
    x: jax.Array, matrix: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    last = x.ndim - 1
    rows, row_scales = _to_int8(x, last)
    columns, column_scales = _to_int8(matrix, 0)
    y = _int8_dot(rows, columns, ((last,), (0,)), x.dtype) * row_scales * column_scales[0]
    return y.astype(x.dtype), (x, columns, column_scales[0])


def _int8_backward(
    kept: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, columns, column_scales = kept
    tokens = tuple(range(gradient.ndim - 1))
    # Devices add their shares up in this format, which must not be wider than activations.
    dmatrix = _dot(x, gradient, (tokens, tokens), x.dtype)
    return _int8_input_gradient(gradient, columns, column_scales), dmatrix


def _int8_input_gradient(
    gradient: jax.Array, columns: jax.Array, column_scales: jax.Array
) -> jax.Array:
    last = gradient.ndim - 1
    rows, row_scales = _to_int8(gradient * column_scales, last)
    dx = _int8_dot(rows, columns, ((last,), (1,)), gradient.dtype) * row_scales
    return dx.astype(gradient.dtype)


int8_matmul.defvjp(_int8_forward, _int8_backward)


@jax.custom_vjp
def int8_matmul_throughout(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Return `int8_matmul(x, matrix)`; the matrix gradient is an int8 matmul too."""
    return _int8_forward(x, matrix)[0]


def _int8_backward_throughout(
    kept: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, columns, column_scales = kept
    tokens = tuple(range(gradient.ndim - 1))
    left, left_scales = _to_int8(x, tokens)
    right, right_scales = _to_int8(gradient, tokens)
    sums = _int8_dot(left, right, (tokens, tokens), x.dtype)
    scales = left_scales.reshape(-1, 1) * right_scales.reshape(-1)
    dmatrix = (sums * scales).astype(x.dtype)
    return _int8_input_gradient(gradient, columns, column_scales), dmatrix


int8_matmul_throughout.defvjp(_int8_forward, _int8_backward_throughout)


def _to_int8(x: jax.Array, axis: Axes) -> Scaled:
    """Return int8 values and float32 scales by the largest magnitude along `axis`."""
    wide = x.astype(jnp.float32)
    scales = absmax_scales(wide, INT8, axis=axis, of_zeros=0.0)
    # A division for every value would be most of the work.
    inverse = jnp.where(scales > 0, 1 / scales, 0.0)
    return to_nearest(wide * inverse, INT8), scales


def _clipped(operand: jax.Array, bound: float | None, axis: int, dtype: jnp.dtype) -> Rounded:
    if bound is None:
        return Rounded(*quantize_channels(operand, FLOAT8_E4M3FN, axis=axis), None)
    scale = jnp.full((1,) * operand.ndim, bound / FLOAT8_E4M3FN.largest, dtype)
    if is_held(operand):
        return Rounded(operand, scale, None)
    values = round_to_bound(operand, FLOAT8_E4M3FN, bound)
    return Rounded(values, scale, jnp.abs(operand) <= bound)


def _masked(gradient: jax.Array, operand: Rounded) -> jax.Array:
    return gradient if operand.inside is None else jnp.where(operand.inside, gradient, 0)


def _dot(
    left: jax.Array, right: jax.Array, contracting: Contracting, dtype: jnp.dtype
) -> jax.Array:
    """Sum in float32 and return the activations' dtype, in which devices exchange the result."""
    return jax.lax.dot_general(left, right, (contracting, ((), ())), preferred_element_type=dtype)


def _scaled_dot(
    left: Scaled, right: Scaled, contracting: Contracting, dtype: jnp.dtype
) -> jax.Array:
    return _dot(left[0], right[0], contracting, dtype) * (left[1] * right[1])


def _int8_dot(
    left: jax.Array, right: jax.Array, contracting: Contracting, dtype: jnp.dtype
) -> jax.Array:
    """Sum in int32 and cast at once, so that devices exchange half the bytes of int32."""
    return _dot(left, right, contracting, jnp.dtype(jnp.int32)).astype(dtype)
