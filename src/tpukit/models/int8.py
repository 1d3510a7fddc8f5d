"""Matrix products in eight-bit integers, forward and backward, scaled as they come.

All three products of a linear layer multiply int8 with int8 and add up in int32:

| product | left operand, scaled by | right operand, scaled by |
|---|---|---|
| y = x W | x, by row | W, by column |
| dx = g Wᵀ | g times the scales of W's columns, by row | W, as it was rounded forward |
| dW = xᵀ g | x √t, by column and batch shard | g / √t, by column and batch shard |

A scale can be taken out of a sum only if it is not summed over. The scales of W's columns are, in
dx: put into g, which is rounded anyway, they spare W a second rounding and a second gather.

Over rows, which are tokens, gradients differ by orders of magnitude, and a column has one scale for
them all. Half of what they differ by, the root of t, the largest of a row of g, is therefore moved
to x: a row is lost when its gradients are 1/254² of the largest row's, and not 1/254 of them.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..kernels.gemm.modes import EIGHT_BITS
from ..parallel.activations import activation_sharding
from ..parallel.mesh import axis_sizes

INT8, LARGEST = EIGHT_BITS["int8"]
# Rows of products of the largest values that an int32 holds for certain.
MOST_ROWS = (2**31 - 1) // 127**2


@jax.custom_vjp
def int8_matmul(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """`x @ matrix` of x (..., K) and matrix (K, N) of one dtype, both rounded to int8.

    Scales are the largest magnitudes of this very step, so nothing overflows and nothing is carried
    between steps; the result has that dtype again.
    """
    return _forward(x, matrix)[0]


def _forward(x: jax.Array, matrix: jax.Array) -> tuple[jax.Array, Any]:
    rows, row_scales = _rounded(x, (x.ndim - 1,))
    columns, column_scales = _rounded(matrix, (0,))
    y = _dot(rows, columns, ((x.ndim - 1,), (0,))) * row_scales * column_scales[0]
    return y.astype(x.dtype), (x, columns, column_scales[0])


def _backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, columns, column_scales = kept
    last = gradient.ndim - 1
    rows, row_scales = _rounded(gradient * column_scales, (last,))
    dx = _dot(rows, columns, ((last,), (1,))) * row_scales
    half = jnp.sqrt(row_scales)
    dmatrix = _over_rows(x * half, gradient * _inverse(half), dtype=x.dtype)
    return dx.astype(x.dtype), dmatrix


int8_matmul.defvjp(_forward, _backward)


def _over_rows(x: jax.Array, gradient: jax.Array, *, dtype: Any) -> jax.Array:
    """`xᵀ gradient`, added up over the rows of each device first, then over devices.

    So a device has scales of its own, which need no exchange, and what devices exchange to add up
    is as narrow as activations, and not int32.
    """
    x, gradient = _by_shard(x), _by_shard(gradient)
    rows = tuple(range(1, x.ndim - 1))
    left, left_scales = _rounded(x, rows)
    right, right_scales = _rounded(gradient, rows)
    sums = _dot(left, right, (rows, rows), batch=((0,), (0,)))
    shards = len(sums)
    scaled = sums * left_scales.reshape(shards, -1, 1) * right_scales.reshape(shards, 1, -1)
    return jax.lax.reduce(scaled.astype(dtype), jnp.zeros((), dtype), jax.lax.add, (0,))


def _by_shard(x: jax.Array) -> jax.Array:
    """(B, ..., C) as (shards, B / shards, ..., C), with few enough rows in a shard for int32."""
    batch, rows = x.shape[0], math.prod(x.shape[:-1])
    place = activation_sharding(x.shape, "batch", *([None] * (x.ndim - 1)))
    shards = 1
    if place is not None:
        axes = place.spec[0] or ()
        sizes = axis_sizes(place.mesh)
        shards = math.prod(sizes[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
    while rows / shards > MOST_ROWS and batch % (shards * 2) == 0:
        shards *= 2
    return x.reshape(shards, batch // shards, *x.shape[1:])


def _rounded(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """int8 values, and float32 scales by the largest magnitude along `axes`, of length 1 there.

    Where there is nothing the scale is 0.
    """
    wide = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=axes, keepdims=True, initial=0.0) / LARGEST
    return jnp.round(wide * _inverse(scales)).astype(INT8), scales


def _inverse(scales: jax.Array) -> jax.Array:
    """1 / scales, and 0 for 0; a division for every value would be most of the work."""
    return jnp.where(scales > 0, 1 / scales, 0.0)


def _dot(
    left: jax.Array,
    right: jax.Array,
    contracting: tuple[tuple[int, ...], tuple[int, ...]],
    *,
    batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> jax.Array:
    sums = jax.lax.dot_general(left, right, (contracting, batch), preferred_element_type=jnp.int32)
    return sums.astype(jnp.float32)
