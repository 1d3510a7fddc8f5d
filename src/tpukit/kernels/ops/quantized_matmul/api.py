"""`quantized_matmul`: activations times a weight that stays quantized until it is multiplied."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError
from ...partition.splits import Splits
from ...registry.gradient import Passes, dispatch_with_gradient, with_gradient
from ...registry.op import PALLAS_TPU, REFERENCE, XLA
from . import pallas_tpu
from .activations import Activations, check_activations
from .blocks import QuantizedBlocks
from .packing import dequantize_arrays
from .reference import quantized_matmul_reference, quantized_matmul_xla, taken
from .weight import QuantizedWeight, check_format, padded_rows

OP_NAME = pallas_tpu.OP_NAME
# Words, codes and groups of scales are pieces of what is summed over.
_WEIGHT = ("... k n", "... k n", "...", "")
SPLITS = Splits(free="m k n", arguments=("m k", *_WEIGHT), result="m n", residuals=_WEIGHT)
# Rows are rounded to int8 by their largest magnitude, which no piece of them knows.
WHOLE_ROWS = replace(SPLITS, free="m n")


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    index: jax.Array | None = None,
    activations: Activations = "bfloat16",
    implementation: str | None = None,
    blocks: QuantizedBlocks | None = None,
) -> jax.Array:
    """`x @ dequantize(weight)`, summed in float32, in x's dtype.

    The weight is a constant: the gradient is that of x, through the dequantized weight.

    Args:
        x: (..., K) activations.
        weight: From `quantize_weight` or one of the `pack_…`.
        index: () which matrix it is, where the weight's arrays have a leading axis of matrices:
            the kernel reads it where it lies in them.
        activations: "bfloat16", or "int8": every row of x is rounded to int8 by its largest
            magnitude, and products are integers (the gradient ignores the rounding).
        implementation: "pallas_tpu", "xla" (dequantized to bfloat16) or "reference" (in x's own
            precision, at least float32). None takes the kernel on TPU and "xla" elsewhere.
        blocks: Of the Pallas kernel; None takes the tuned ones.

    Raises:
        TPUKernelError: x has another width than the weight, or the formats do not go together.
    """
    check_format(weight.format)
    check_activations(activations, weight.format)
    if x.shape[-1] != weight.shape[0]:
        raise TPUKernelError(
            f"x is {x.shape} and the weight {weight.shape}; the last axis of x must have "
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
        splits=SPLITS if activations == "bfloat16" else WHOLE_ROWS,
        implementation=implementation,
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
    format: Any,
    activations: Activations = "bfloat16",
    implementation: str | None = None,
    blocks: QuantizedBlocks | None = None,
) -> jax.Array:
    """`quantized_matmul` of a weight given by its parts; x has the padded width."""
    shape = (padded_rows(format, data), data.shape[-1])
    weight = QuantizedWeight(data, scales, codebook, format, shape)
    return quantized_matmul(
        x, weight, activations=activations, implementation=implementation, blocks=blocks
    )


def _constant_weight(function: Any) -> Passes:
    """Both passes of an implementation; the backward pass is XLA's for all of them."""

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

    def backward(residuals: Any, cotangent: jax.Array, **options: Any) -> tuple[Any, ...]:
        weight = taken(*residuals)
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
