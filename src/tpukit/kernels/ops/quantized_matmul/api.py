"""`quantized_matmul`: activations times a weight that stays quantized in memory."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ....annotations import PyTree
from ....errors import TPUKernelError
from ....hardware.stored_formats import WEIGHT_FORMATS
from ...blocks.tiling import LANES
from ...partition.splits import Splits
from ...registry.dispatch import Passes, dispatch_with_gradient, with_gradient
from ...registry.op import PALLAS_TPU, REFERENCE, XLA, KernelCase, Op
from ...rounding import decode
from . import pallas_tpu
from .pallas_tpu import QuantizedBlocks, block_space, bucket, default_blocks, vmem_bytes
from .weight import (
    Activations,
    QuantizedWeight,
    check_activations,
    check_format,
    dequantize_arrays,
    padded_rows,
    quantize_rows,
)


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
    """Compute `quantized_matmul` in plain jnp; bfloat16 activations keep the precision of x."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    weight = one_matrix(data, scales, codebook, index)
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
    """Compute `quantized_matmul` with the weight dequantized to bfloat16, which is faster."""
    if activations == "int8":
        return quantized_matmul_reference(
            x, data, scales, codebook, index, format=format, activations=activations
        )
    weight = one_matrix(data, scales, codebook, index)
    matrix = dequantize_arrays(*weight, format=format, dtype=jnp.bfloat16)
    product = jnp.dot(x.astype(jnp.bfloat16), matrix, preferred_element_type=jnp.float32)
    return product.astype(x.dtype)


def one_matrix(
    data: jax.Array, scales: jax.Array, codebook: jax.Array | None, index: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the arrays of one matrix, if they have a leading axis of matrices."""
    arrays = (data, scales, codebook)
    return arrays if index is None else jax.tree.map(lambda leaf: leaf[index], arrays)


OP_NAME = pallas_tpu.OP_NAME
# Words, codes and groups of scales are along the contracted dimension.
_WEIGHT = ("... k n", "... k n", "...", "")
SPLITS = Splits(free="m k n", arguments=("m k", *_WEIGHT), result="m n", residuals=_WEIGHT)
# Rows are rounded to int8 by their largest magnitude, which a shard of a row does not have.
FULL_ROWS = replace(SPLITS, free="m n")


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    index: jax.Array | None = None,
    activations: Activations = "bfloat16",
    implementation: str | None = None,
    blocks: QuantizedBlocks | None = None,
) -> jax.Array:
    """Return `x @ dequantize(weight)`, summed in float32, in x's dtype.

    The weight is a constant: only x has a gradient, through the dequantized weight.

    Args:
        x: (..., K) activations.
        weight: From `quantize_weight` or one of the `pack_…` functions.
        index: () number of the matrix, where the weight's arrays have a leading axis of matrices.
            The kernel reads the matrix in place.
        activations: "bfloat16", or "int8": every row of x is rounded to int8 by its largest
            magnitude, and the matmul is of integers (the gradient ignores the rounding).
        implementation: "pallas_tpu", "xla" (dequantized to bfloat16) or "reference" (in x's own
            precision, at least float32). None takes the kernel on TPU and "xla" elsewhere.
        blocks: Block sizes of the Pallas kernel; None takes the tuned ones.

    Raises:
        TPUKernelError: x has another width than the weight, or the formats do not match.
    """
    check_format(weight.format)
    check_activations(activations, weight.format)
    if x.shape[-1] != weight.shape[0]:
        raise TPUKernelError(
            f"x is {x.shape}, but the weight is {weight.shape}; the last axis of x must have "
            f"{weight.shape[0]} elements."
        )
    rows = x.reshape(-1, x.shape[-1])
    missing = padded_rows(weight.format, weight.data) - rows.shape[1]
    if missing:
        rows = jnp.pad(rows, ((0, 0), (0, missing)))
    out = dispatch_with_gradient(
        OP_NAME,
        PASSES,
        *(rows, weight.data, weight.scales, weight.codebook, index),
        splits=SPLITS if activations == "bfloat16" else FULL_ROWS,
        implementation=implementation,
        on_tpu=PALLAS_TPU if pallas_tpu.can_multiply(weight.format) else XLA,
        on_gpu=XLA,
        elsewhere=XLA,
        options={"format": weight.format, "activations": activations},
        pallas_options={"blocks": blocks},
    )
    return out.reshape(*x.shape[:-1], weight.shape[1])


def quantized_matmul_arrays(
    x: jax.Array,
    data: jax.Array,
    scales: jax.Array,
    codebook: jax.Array | None = None,
    *,
    format: str,
    activations: Activations = "bfloat16",
    implementation: str | None = None,
    blocks: QuantizedBlocks | None = None,
) -> jax.Array:
    """Call `quantized_matmul` with a weight given by its arrays; x has the padded width."""
    shape = (padded_rows(format, data), data.shape[-1])
    weight = QuantizedWeight(data, scales, codebook, format, shape)
    return quantized_matmul(
        x, weight, activations=activations, implementation=implementation, blocks=blocks
    )


def _constant_weight(function: Any) -> Passes:
    """Return both passes of an implementation; the backward pass is XLA's for all of them."""

    def forward(
        x: jax.Array,
        data: jax.Array,
        scales: jax.Array,
        codebook: jax.Array | None = None,
        index: jax.Array | None = None,
        **options: Any,
    ) -> tuple[jax.Array, Any]:
        weight = (data, scales, codebook, index)
        return function(x, *weight, **options), weight

    def backward(residuals: PyTree, cotangent: jax.Array, **options: Any) -> tuple[Any, ...]:
        weight = one_matrix(*residuals)
        matrix = dequantize_arrays(*weight, format=options["format"], dtype=cotangent.dtype)
        wide = jnp.promote_types(cotangent.dtype, jnp.float32)
        d_x = jnp.dot(cotangent, matrix.T, preferred_element_type=wide)
        return d_x.astype(cotangent.dtype), None, None, None, None

    return Passes(forward, backward)


PASSES = {
    PALLAS_TPU: _constant_weight(pallas_tpu.forward),
    XLA: _constant_weight(quantized_matmul_xla),
    REFERENCE: _constant_weight(quantized_matmul_reference),
}
IMPLEMENTATIONS = {name: with_gradient(OP_NAME, PASSES, name, SPLITS) for name in PASSES}


def quantized_case(
    format: str,
    rows: int,
    width: int,
    columns: int,
    *,
    activations: Activations = "bfloat16",
    entries: int = 128,
    stages: int = 1,
) -> KernelCase:
    """Return the case of (rows, width) activations times a (width, columns) matrix.

    Args:
        format: Format of the matrix.
        rows: Rows of activations.
        width: Contracted size.
        columns: Columns of the matrix.
        activations: Format of the activations.
        entries: Entries of a codebook.
        stages: Stages of codes.
    """
    stored = WEIGHT_FORMATS[format]
    array = jax.ShapeDtypeStruct
    groups = 1 if stored.block is None else width // stored.block
    data, name = (width // stored.values_per_element, columns), format
    codebook: tuple[jax.ShapeDtypeStruct, ...] = ()
    if stored.has_codebook:
        data, name = (stages, *data), f"{format}{stages}x{entries}"
        codebook = (array((stages, entries // LANES, LANES), jnp.int32),)
    weight = (array(data, stored.dtype), array((groups, columns), jnp.float32), *codebook)
    return KernelCase(
        f"{name}_{activations}_{rows}x{width}x{columns}",
        (array((rows, width), jnp.bfloat16), *weight),
        {"format": format, "activations": activations},
    )


OP = Op(
    name=OP_NAME,
    function=quantized_matmul_arrays,
    implementations=IMPLEMENTATIONS,
    cases=(
        quantized_case("int8", 32, 512, 512),
        quantized_case("int8", 32, 512, 512, activations="int8"),
        quantized_case("int4", 32, 512, 512),
        quantized_case("fp8", 32, 512, 512),
        quantized_case("vq", 32, 512, 512),
        quantized_case("vq", 32, 512, 512, entries=256, activations="int8"),
        quantized_case("int8", 16, 4096, 14336),
        quantized_case("int4", 16, 4096, 14336),
        quantized_case("vq", 16, 4096, 14336),
        quantized_case("int4", 2048, 4096, 14336),
    ),
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    on_gpu=XLA,
    bucket=bucket,
    splits=SPLITS,
)
