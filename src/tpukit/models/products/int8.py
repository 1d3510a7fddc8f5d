"""Matrix products in eight-bit integers, forward and back to the inputs, scaled as they come.

Two of the three products of a linear layer multiply int8 with int8 and add up in int32:

| product | left operand, scaled by | right operand, scaled by |
|---|---|---|
| y = x W | x, by row | W, by column |
| dx = g Wᵀ | g times the scales of W's columns, by row | W, as it was rounded forward |
| dW = xᵀ g | not rounded | not rounded |

A scale can be taken out of a sum only if it is not summed over. The scales of W's columns are, in
dx: put into g, which is rounded anyway, they spare W a second rounding and a second gather.

dW stays as wide as activations. It is summed over tokens, whose gradients differ by orders of
magnitude, and the compiler makes it in int8 hardly faster: contracted over rows it takes as long as
in bfloat16 on v5e and v5p, and on v6e it saves about what two more roundings cost.
`int8_matmul_throughout` rounds it too, x and g by column, as MaxText's recipes do.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ...hardware.formats import INT8
from ...kernels.rounding import absmax_scales, to_nearest


@jax.custom_vjp
def int8_matmul(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """`x @ matrix` of x (..., K) and matrix (K, N) of one dtype, both rounded to int8.

    Scales are the largest magnitudes of this very step, so nothing overflows and nothing is carried
    between steps; the result has that dtype again. An int32 holds the sum of 133,000 products of
    the largest values, more than any K in use.
    """
    return _forward(x, matrix)[0]


def _forward(x: jax.Array, matrix: jax.Array) -> tuple[jax.Array, Any]:
    last = x.ndim - 1
    rows, row_scales = _rounded(x, last)
    columns, column_scales = _rounded(matrix, 0)
    y = _dot(rows, columns, ((last,), (0,)), x.dtype) * row_scales * column_scales[0]
    return y.astype(x.dtype), (x, columns, column_scales[0])


def _backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, columns, column_scales = kept
    tokens = tuple(range(gradient.ndim - 1))
    # Devices add their shares up in this format, which must not be wider than activations.
    dmatrix = jax.lax.dot_general(
        x, gradient, ((tokens, tokens), ((), ())), preferred_element_type=x.dtype
    )
    return _to_inputs(gradient, columns, column_scales), dmatrix


def _to_inputs(gradient: jax.Array, columns: jax.Array, column_scales: jax.Array) -> jax.Array:
    last = gradient.ndim - 1
    rows, row_scales = _rounded(gradient * column_scales, last)
    dx = _dot(rows, columns, ((last,), (1,)), gradient.dtype) * row_scales
    return dx.astype(gradient.dtype)


int8_matmul.defvjp(_forward, _backward)


@jax.custom_vjp
def int8_matmul_throughout(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """`int8_matmul` whose gradient of the matrix is a product of int8 too."""
    return _forward(x, matrix)[0]


def _backward_throughout(kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, columns, column_scales = kept
    tokens = tuple(range(gradient.ndim - 1))
    left, left_scales = _rounded(x, tokens)
    right, right_scales = _rounded(gradient, tokens)
    sums = _dot(left, right, (tokens, tokens), x.dtype)
    scales = left_scales.reshape(-1, 1) * right_scales.reshape(-1)
    return _to_inputs(gradient, columns, column_scales), (sums * scales).astype(x.dtype)


int8_matmul_throughout.defvjp(_forward, _backward_throughout)


def _rounded(x: jax.Array, axis: int | tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """int8 values, and float32 scales by the largest magnitude along `axis`; 0 of nothing."""
    wide = x.astype(jnp.float32)
    scales = absmax_scales(wide, INT8, axis=axis, of_zeros=0.0)
    # A division for every value would be most of the work.
    inverse = jnp.where(scales > 0, 1 / scales, 0.0)
    return to_nearest(wide * inverse, INT8), scales


def _dot(
    left: jax.Array,
    right: jax.Array,
    contracting: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: Any,
) -> jax.Array:
    """The sums as narrow as activations at once: what devices add up is then half of int32."""
    sums = jax.lax.dot_general(
        left, right, (contracting, ((), ())), preferred_element_type=jnp.int32
    )
    return sums.astype(dtype)
