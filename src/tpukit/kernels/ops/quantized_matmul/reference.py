"""The quantized matmul in plain jnp: dequantize, then multiply."""

import jax
import jax.numpy as jnp

from ...rounding import decode
from .activations import Activations, quantize_rows
from .packing import dequantize_arrays


def quantized_matmul_reference(
    x: jax.Array,
    data: jax.Array,
    scales: jax.Array,
    codebook: jax.Array | None,
    index: jax.Array | None = None,
    *,
    format: str,
    activations: Activations = "bfloat16",
) -> jax.Array:
    """See `quantized_matmul`; bfloat16 activations keep whatever precision x has."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    weight = taken(data, scales, codebook, index)
    matrix = dequantize_arrays(*weight, format=format, dtype=wide)
    left = x.astype(wide)
    if activations == "int8":
        values, row_scales = quantize_rows(x)
        left = decode(values, row_scales, wide)
    product = jnp.dot(left, matrix, precision=jax.lax.Precision.HIGHEST)
    return product.astype(x.dtype)


def quantized_matmul_xla(
    x: jax.Array,
    data: jax.Array,
    scales: jax.Array,
    codebook: jax.Array | None = None,
    index: jax.Array | None = None,
    *,
    format: str,
    activations: Activations = "bfloat16",
) -> jax.Array:
    """The same with the weight dequantized to bfloat16, which is the faster product."""
    if activations == "int8":
        return quantized_matmul_reference(
            x, data, scales, codebook, index, format=format, activations=activations
        )
    weight = taken(data, scales, codebook, index)
    matrix = dequantize_arrays(*weight, format=format, dtype=jnp.bfloat16)
    product = jnp.dot(x.astype(jnp.bfloat16), matrix, preferred_element_type=jnp.float32)
    return product.astype(x.dtype)


def taken(
    data: jax.Array, scales: jax.Array, codebook: jax.Array | None, index: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The arrays of the matrix that is meant, where they have a leading axis of matrices."""
    arrays = (data, scales, codebook)
    return arrays if index is None else jax.tree.map(lambda leaf: leaf[index], arrays)
