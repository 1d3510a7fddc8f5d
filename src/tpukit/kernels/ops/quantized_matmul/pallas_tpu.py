"""The quantized matmul as a TPU kernel: packed weights travel, values exist only in VMEM."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....errors import TPUKernelError
from ....hardware.target import current_target
from ...blocks.tiling import LANES
from ...blocks.tuned import blocks_for
from ...blocks.vmem import vmem_limit_bytes
from ...registry.op import KernelCase
from ..gemm.tile import Interpret, tile_dot
from .activations import Activations, quantize_rows
from .blocks import QuantizedBlocks, vmem_bytes
from .weight import ROWS_PER_ELEMENT

OP_NAME = "quantized_matmul"


def forward(
    x: jax.Array,
    data: jax.Array,
    scales: jax.Array,
    codebook: jax.Array | None,
    *,
    format: str,
    activations: Activations = "bfloat16",
    blocks: QuantizedBlocks | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """(M, K) times a weight of padded (K, N): see `quantized_matmul`."""
    case = _case(x, data, scales, codebook, format, activations)
    chosen = _blocks_for(case, blocks)
    rows, total = x.shape
    columns = data.shape[-1]
    group = total // scales.shape[0]
    _check(chosen, total, group)
    grid = (
        pl.cdiv(rows, chosen.rows),
        pl.cdiv(columns, chosen.columns),
        total // chosen.contraction,
    )
    if activations == "int8":
        values, row_scales = quantize_rows(x)
    else:
        values, row_scales = x.astype(jnp.bfloat16), jnp.ones((rows, 1), jnp.float32)
    # Scales of a block are a dimension of their own: too few rows to be cut by 8.
    groups = max(1, chosen.contraction // group)
    by_block = scales.reshape(-1, groups, columns)
    integer_sum = activations == "int8" and format != "int4"
    in_specs = [
        pl.BlockSpec((chosen.rows, chosen.contraction), lambda i, j, k: (i, k)),
        pl.BlockSpec((chosen.rows, 1), lambda i, j, k: (i, 0)),
        _data_spec(format, data, chosen),
        pl.BlockSpec(
            (1, groups, chosen.columns),
            (lambda i, j, k: (k, 0, j)) if format == "int4" else (lambda i, j, k: (0, 0, j)),
        ),
    ]
    operands = [values, row_scales, data, by_block]
    if codebook is not None:
        in_specs.append(pl.BlockSpec(codebook.shape, lambda i, j, k: (0, 0, 0)))
        operands.append(codebook)
    return pl.pallas_call(
        partial(_kernel, format=format, sticks_out=columns % chosen.columns != 0),
        grid=grid,
        in_specs=in_specs,
        out_specs=pl.BlockSpec((chosen.rows, chosen.columns), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        scratch_shapes=[
            pltpu.VMEM((chosen.rows, chosen.columns), jnp.int32 if integer_sum else jnp.float32)
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes(vmem_bytes(case, chosen), current_target()),
        ),
        interpret=interpret,
        name=f"{OP_NAME}_{format}",
    )(*operands)


def _kernel(
    x: Any, row_scales: Any, data: Any, scales: Any, *refs: Any, format: str, sticks_out: bool
) -> None:
    codebook, (out, total) = (refs[0] if format == "vq" else None), refs[-2:]
    step, steps = pl.program_id(2), pl.num_programs(2)

    @pl.when(step == 0)
    def _start() -> None:
        total[...] = jnp.zeros(total.shape, total.dtype)

    if format == "int4":
        parts = [_int4_group(x, data, scales, group) for group in range(scales.shape[1])]
    elif format == "vq":
        # Stages are added as products: the vector unit adds no int8.
        parts = [
            tile_dot(x[...], _decoded(codebook, data, stage, mask=sticks_out).astype(x.dtype))
            for stage in range(data.shape[0])
        ]
    else:
        parts = [tile_dot(x[...], data[...].astype(x.dtype))]
    total[...] += sum(parts[1:], parts[0])

    @pl.when(step == steps - 1)
    def _finish() -> None:
        result = total[...].astype(jnp.float32) * row_scales[...]
        if format != "int4":
            result = result * scales[0]
        out[...] = result.astype(out.dtype)


def _int4_group(x: Any, data: Any, scales: Any, group: int) -> jax.Array:
    size = x.shape[1] // scales.shape[1]
    words = size // ROWS_PER_ELEMENT["int4"]
    packed = data[group * words : (group + 1) * words, :]
    values = pltpu.bitcast(packed, jnp.int4).astype(x.dtype)
    product = tile_dot(x[:, group * size : (group + 1) * size], values)
    return product.astype(jnp.float32) * scales[0, group : group + 1, :]


def _decoded(codebook: Any, codes: Any, stage: int, *, mask: bool) -> jax.Array:
    """int8 values of a block of codes: words by a permutation of lanes, then spread over rows."""
    tables = codebook.shape[1]
    found: list[jax.Array] = []
    for start in range(0, codes.shape[2], LANES):
        code = codes[stage, :, start : start + LANES].astype(jnp.int32)
        # Past the last column lies anything; a code there must still be one.
        lane = code & (LANES - 1) if mask or tables > 1 else code
        words: jax.Array | None = None
        for table in range(tables):
            entries = codebook[stage, table : table + 1, :]
            taken = jnp.take_along_axis(
                jnp.broadcast_to(entries, lane.shape), lane, axis=1, mode="promise_in_bounds"
            )
            words = taken if words is None else jnp.where(code >> 7 == table, taken, words)
        assert words is not None
        found.append(words)
    return pltpu.bitcast(jnp.concatenate(found, axis=1), jnp.int8)


def _data_spec(format: str, data: jax.Array, blocks: QuantizedBlocks) -> pl.BlockSpec:
    height = blocks.contraction // ROWS_PER_ELEMENT[format]
    if format == "vq":
        return pl.BlockSpec((data.shape[0], height, blocks.columns), lambda i, j, k: (0, k, j))
    return pl.BlockSpec((height, blocks.columns), lambda i, j, k: (k, j))


def _blocks_for(case: KernelCase, blocks: QuantizedBlocks | None) -> QuantizedBlocks:
    chosen = blocks_for(OP_NAME, case, blocks)
    if blocks is not None:
        return chosen
    # Tuned for sizes up to a power of two, which this one need not be.
    return replace(chosen, contraction=math.gcd(chosen.contraction, case.arguments[0].shape[1]))


def _check(blocks: QuantizedBlocks, total: int, group: int) -> None:
    size = blocks.contraction
    if size % LANES or total % size or (group < total and size % group):
        raise TPUKernelError(
            f"contraction={size} does not cut {total} padded rows (groups of {group}); it must be "
            f"a multiple of {LANES if group == total else group} that divides {total}."
        )


def _case(
    x: jax.Array,
    data: jax.Array,
    scales: jax.Array,
    codebook: jax.Array | None,
    format: str,
    activations: Activations,
) -> KernelCase:
    arrays = [array for array in (x, data, scales, codebook) if array is not None]
    return KernelCase(
        "traced",
        tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays),
        {"format": format, "activations": activations},
    )
