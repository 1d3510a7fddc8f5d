"""The gradient of a gated activation as a Pallas kernel for TPU: both halves in one pass.

XLA reads and writes every value once as well, in both directions: the kernel is for those who ask
for it by name, and its forward pass is XLA's. The figures are in `specs.py`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....hardware.target import current_target
from ...blocks.tiling import LANES, tile_shape
from ...blocks.tuned import blocks_for
from ...blocks.vmem import vmem_limit_bytes
from ..rms_norm.blocks import RowBlocks, row_case, vmem_bytes
from ..rms_norm.blocks import fits as rows_fit
from . import reference

OP_NAME = "gated_activation"
TILES_ACROSS = 8  # worked on at a time: few enough that their values stay in registers


def fits(both: Any, chip: str | None) -> bool:
    """Whether the kernel takes it: rows that fit in VMEM, and halves of whole tiles."""
    return rows_fit(both, chip) and both.shape[-1] % (2 * LANES) == 0


def forward(
    both: jax.Array, *, blocks: RowBlocks | None = None, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """The product, as XLA makes it; its gradient needs both factors."""
    return reference.forward(both)


def backward(
    both: jax.Array,
    cotangent: jax.Array,
    *,
    blocks: RowBlocks | None = None,
    interpret: Any = False,
) -> tuple[jax.Array]:
    """The gradient of gate and value side by side."""
    width = cotangent.shape[-1]
    rows = cotangent.size // width
    case = row_case(both)
    chosen = blocks_for(OP_NAME, case, blocks)
    block = chosen.block_rows
    tall = math.gcd(block, tile_shape(both.dtype)[0])
    wide = LANES * math.gcd(width // LANES, TILES_ACROSS)

    def kernel(both_ref: Any, cotangent_ref: Any, out_ref: Any) -> None:
        def body(step: jax.Array, _: None) -> None:
            # Not `//`, whose sign the compiler decides by the TPU at hand, and there is none.
            down, across = jax.lax.div(step, width // wide), jax.lax.rem(step, width // wide)
            at = pl.ds(pl.multiple_of(down * tall, tall), tall)
            left = pl.multiple_of(across * wide, wide)
            gate_at, value_at = pl.ds(left, wide), pl.ds(width + left, wide)
            d_gate, d_value = reference.gradients(
                both_ref[at, gate_at], both_ref[at, value_at], cotangent_ref[at, gate_at]
            )
            out_ref[at, gate_at] = d_gate.astype(out_ref.dtype)
            out_ref[at, value_at] = d_value.astype(out_ref.dtype)

        jax.lax.fori_loop(0, block // tall * (width // wide), body, None)

    pair, single = (pl.BlockSpec((block, n * width), lambda i: (i, 0)) for n in (2, 1))
    d_both = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows, 2 * width), both.dtype),
        grid=(pl.cdiv(rows, block),),
        in_specs=[pair, single],
        out_specs=pair,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=vmem_limit_bytes(vmem_bytes(case, chosen), current_target()),
        ),
        interpret=interpret,
        name="gated_activation_backward",
    )(both.reshape(rows, 2 * width), cotangent.reshape(rows, width))
    return (jnp.reshape(d_both, both.shape),)
