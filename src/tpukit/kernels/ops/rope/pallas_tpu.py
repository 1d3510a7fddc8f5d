"""Turning as a Pallas kernel for TPU: heads side by side in whole lanes, one pass over HBM.

A pair lies half a head apart, so each group of 128 lanes is rotated by half a head within itself
and multiplied by tables that hold the sign, and zero where the rotation brought a neighbour in.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....hardware.target import current_target
from ...blocks.tiling import LANES, tile_shape
from ...blocks.tuned import blocks_for
from ...blocks.vmem import vmem_limit_bytes
from ...registry.op import KernelCase
from . import reference
from .blocks import RopeBlocks, vmem_bytes

DTYPES = ("float32", "bfloat16")
Tables = tuple[jax.Array, jax.Array]


def supported(x: Any) -> bool:
    """Whether heads of this size and number fill whole lanes, and the dtype is one of ours."""
    _, _, heads, width = x.shape
    even = width % (2 * LANES) == 0 or LANES % width == 0
    return x.dtype in DTYPES and x.size > 0 and even and heads * width % LANES == 0


def forward(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    blocks: RopeBlocks | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, Tables]:
    """The result, and the tables as residuals."""
    return rotate(x, cos, sin, blocks=blocks, interpret=interpret), (cos, sin)


def backward(
    residuals: Tables,
    cotangent: jax.Array,
    *,
    blocks: RopeBlocks | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, None, None]:
    """A rotation is undone by its opposite; tables are data and have no gradient."""
    cos, sin = residuals
    return rotate(cotangent, cos, -sin, blocks=blocks, interpret=interpret), None, None


def rotate(
    x: jax.Array, cos: jax.Array, sin: jax.Array, *, blocks: RopeBlocks | None, interpret: Any
) -> jax.Array:
    """Turn x (B, S, H, D) by tables of (S, D / 2) or (B, S, D / 2)."""
    if not supported(x):
        # A device's share of the heads may not fill whole lanes where all of them do.
        return reference.rope(x, cos, sin)
    batch, length, heads, width = x.shape
    case = KernelCase("traced", (jax.ShapeDtypeStruct(x.shape, x.dtype),))
    chosen = blocks_for("rope", case, blocks)
    block, chunk = chosen.block_tokens, tile_shape(x.dtype)[0]
    tables = _lane_tables(cos, sin, width)
    group = tables[0].shape[-1]
    half = width // 2

    def kernel(x_ref: Any, *refs: Any) -> None:
        table_refs, out_ref = refs[:-1], refs[-1]

        def body(step: jax.Array, _: None) -> None:
            at = pl.ds(pl.multiple_of(step * chunk, chunk), chunk)
            kept, *rotated = (ref[at, :] for ref in table_refs)
            for start in range(0, heads * width, group):
                lanes = pl.ds(start, group)
                value = x_ref[at, lanes].astype(jnp.float32)
                out = value * kept
                # The second table takes the channel half a head below, the first the one above.
                for table, shift in zip(rotated, (group - half, half), strict=False):
                    out = out + pltpu.roll(value, shift, 1) * table
                out_ref[at, lanes] = out.astype(out_ref.dtype)

        jax.lax.fori_loop(0, block // chunk, body, None)

    window = pl.BlockSpec((None, block, heads * width), lambda i, b: (b, i, 0))
    # The batch is the inner axis, so tables that it shares are not read again for it.
    table = (
        pl.BlockSpec((block, group), lambda i, b: (i, 0))
        if cos.ndim == 2
        else pl.BlockSpec((None, block, group), lambda i, b: (b, i, 0))
    )
    limit = vmem_limit_bytes(vmem_bytes(case, chosen), current_target())
    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((batch, length, heads * width), x.dtype),
        grid=(pl.cdiv(length, block), batch),
        in_specs=[window, *[table for _ in tables]],
        out_specs=window,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=limit
        ),
        interpret=interpret,
        name="rope",
    )(x.reshape(batch, length, heads * width), *tables)
    return out.reshape(x.shape)


def _lane_tables(cos: jax.Array, sin: jax.Array, width: int) -> list[jax.Array]:
    """Tables of whole lanes: what stays, what comes from above, and from below if that differs."""
    cos, sin = (jnp.asarray(table, jnp.float32) for table in (cos, sin))
    repeats = max(LANES // width, 1)

    def spread(first: jax.Array, second: jax.Array) -> jax.Array:
        one = jnp.concatenate([first, second], axis=-1)
        return jnp.concatenate([one] * repeats, axis=-1)

    kept = spread(cos, cos)
    if repeats == 1:
        # Rotated by half of itself, a head gives each channel its partner, from either side.
        return [kept, spread(-sin, sin)]
    nothing = jnp.zeros_like(sin)
    return [kept, spread(-sin, nothing), spread(nothing, sin)]
