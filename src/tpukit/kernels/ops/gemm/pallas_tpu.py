"""A tiled matmul as a TPU kernel, for eight bits with scales and for float32 in full."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....hardware.target import current_target
from ...blocks.tiling import LANES, round_up
from ...blocks.tuned import blocks_for
from ...blocks.vmem import vmem_limit_bytes
from ...registry.op import KernelCase
from .blocks import GemmBlocks, vmem_bytes
from .tile import Interpret, accumulate, tile_dot

OP_NAME = "gemm"


def product(
    a: jax.Array,
    b: jax.Array,
    a_scales: jax.Array | None,
    b_scales: jax.Array | None,
    *,
    out_dtype: str,
    passes: str,
    blocks: GemmBlocks | None = None,
    tuned_as: KernelCase | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """`(a @ b) * a_scales * b_scales`, summed in float32 or int32.

    Args:
        a: (M, K).
        b: (K, N), of a's dtype.
        a_scales: (M, 1) float32, or None.
        b_scales: (1, N) float32, or None.
        out_dtype: Of the result.
        passes: "default" or "highest", for float32; the kernel has nothing between.
        blocks: None takes those tuned, or those that fit.
        tuned_as: The product as it was asked for: tuned blocks are those of its dtypes and options,
            at the shapes here.
        interpret: Run without a TPU.
    """
    rows, columns = a.shape[0], b.shape[1]
    case = KernelCase("traced", tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b)))
    chosen = _blocks_for(tuned_as or case, a.shape, b.shape, blocks)
    missing = -a.shape[1] % chosen.contraction
    if missing:
        # Zeros add nothing to the sum; what lies past the end of an array might.
        a, b = jnp.pad(a, ((0, 0), (0, missing))), jnp.pad(b, ((0, missing), (0, 0)))
    scales = [scale for scale in (a_scales, b_scales) if scale is not None]
    in_specs = [
        pl.BlockSpec((chosen.rows, chosen.contraction), lambda i, j, k: (i, k)),
        pl.BlockSpec((chosen.contraction, chosen.columns), lambda i, j, k: (k, j)),
    ]
    if scales:
        in_specs.append(pl.BlockSpec((chosen.rows, 1), lambda i, j, k: (i, 0)))
        in_specs.append(pl.BlockSpec((1, chosen.columns), lambda i, j, k: (0, j)))
    total = jnp.int32 if jnp.issubdtype(a.dtype, jnp.integer) else jnp.float32
    return pl.pallas_call(
        _kernel,
        grid=(
            pl.cdiv(rows, chosen.rows),
            pl.cdiv(columns, chosen.columns),
            a.shape[1] // chosen.contraction,
        ),
        in_specs=in_specs,
        out_specs=pl.BlockSpec((chosen.rows, chosen.columns), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), out_dtype),
        scratch_shapes=[pltpu.VMEM((chosen.rows, chosen.columns), total)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes(vmem_bytes(case, chosen), current_target()),
        ),
        interpret=interpret,
        name=OP_NAME,
    )(a, b, *scales)


def _blocks_for(
    asked: KernelCase, a: tuple[int, ...], b: tuple[int, ...], blocks: GemmBlocks | None
) -> GemmBlocks:
    dtypes = (one.dtype for one in asked.arguments)
    shapes = tuple(map(jax.ShapeDtypeStruct, (a, b), dtypes))
    chosen = blocks_for(OP_NAME, replace(asked, arguments=shapes), blocks)
    if blocks is not None:
        return chosen
    # Tuned for sizes up to a power of two, to which nothing should be padded.
    return replace(chosen, contraction=math.gcd(chosen.contraction, round_up(a[1], LANES)))


def _kernel(a: Any, b: Any, *refs: Any) -> None:
    scales, (out, total) = refs[:-2], refs[-2:]
    step, steps = pl.program_id(2), pl.num_programs(2)
    addend = tile_dot(a[...], b[...])
    accumulate(total, addend, step)

    @pl.when(step == steps - 1)
    def _finish() -> None:
        result = total[...]
        if scales:
            result = result.astype(jnp.float32) * scales[0][...] * scales[1][...]
        out[...] = result.astype(out.dtype)
