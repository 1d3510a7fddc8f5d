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
    index: jax.Array | None = None,
    *,
    format: str,
    activations: Activations = "bfloat16",
    blocks: QuantizedBlocks | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """(M, K) times a weight of padded (K, N): see `quantized_matmul`."""
    shapes = _shapes(x, data, scales, codebook, is_stack=index is not None)
    case = KernelCase("traced", shapes, {"format": format, "activations": activations})
    chosen = _blocks_for(case, blocks)
    rows, total = x.shape
    columns = data.shape[-1]
    group = total // scales.shape[-2]
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
    by_block = scales.reshape(*scales.shape[:-2], -1, groups, columns)
    weight = [data, by_block] if codebook is None else [data, by_block, codebook]
    integer_sum = activations == "int8" and format != "int4"
    specs = _weight_specs(case, chosen, groups)
    if index is None:
        which: list[jax.Array] = []
    else:
        which = [index.astype(jnp.int32).reshape(1)]
        specs = [_of_stack(spec) for spec in specs]
    return pl.pallas_call(
        partial(_kernel, format=format, sticks_out=columns % chosen.columns != 0),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(which),
            grid=grid,
            in_specs=[
                pl.BlockSpec((chosen.rows, chosen.contraction), lambda i, j, k, *_: (i, k)),
                pl.BlockSpec((chosen.rows, 1), lambda i, j, k, *_: (i, 0)),
                *specs,
            ],
            out_specs=pl.BlockSpec((chosen.rows, chosen.columns), lambda i, j, k, *_: (i, j)),
            scratch_shapes=[
                pltpu.VMEM((chosen.rows, chosen.columns), jnp.int32 if integer_sum else jnp.float32)
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes(vmem_bytes(case, chosen), current_target()),
        ),
        interpret=interpret,
        name=f"{OP_NAME}_{format}",
    )(*which, values, row_scales, *weight)


def _kernel(*refs: Any, format: str, sticks_out: bool) -> None:
    *arrays, out, total = refs
    codebook = arrays.pop() if format == "vq" else None
    x, row_scales, data, scales = arrays[-4:]  # before them, which matrix of a stack it is
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


def _weight_specs(case: KernelCase, blocks: QuantizedBlocks, groups: int) -> list[pl.BlockSpec]:
    """Of data, scales by block, and the codebook where there is one."""
    format, data = case.options["format"], case.arguments[1]
    height = blocks.contraction // ROWS_PER_ELEMENT[format]
    scaled = pl.BlockSpec(
        (1, groups, blocks.columns),
        (lambda i, j, k: (k, 0, j)) if format == "int4" else (lambda i, j, k: (0, 0, j)),
    )
    if format != "vq":
        return [pl.BlockSpec((height, blocks.columns), lambda i, j, k: (k, j)), scaled]
    codes = pl.BlockSpec((data.shape[0], height, blocks.columns), lambda i, j, k: (0, k, j))
    return [codes, scaled, pl.BlockSpec(case.arguments[3].shape, lambda i, j, k: (0, 0, 0))]


def _of_stack(spec: pl.BlockSpec) -> pl.BlockSpec:
    """The same block of the matrix whose number comes before the arrays."""
    assert spec.block_shape is not None
    place = spec.index_map
    assert place is not None
    return pl.BlockSpec(
        (None, *spec.block_shape), lambda i, j, k, which: (which[0], *place(i, j, k))
    )


def _blocks_for(case: KernelCase, blocks: QuantizedBlocks | None) -> QuantizedBlocks:
    chosen = blocks_for(OP_NAME, case, blocks)
    if blocks is not None:
        return chosen
    # Tuned for sizes up to a power of two, which this one need not be; and a device's piece of the
    # sum need not be whole tiles.
    total = case.arguments[0].shape[1]
    size = math.gcd(chosen.contraction, total)
    return replace(chosen, contraction=total if size % LANES else size)


def _check(blocks: QuantizedBlocks, total: int, group: int) -> None:
    size = blocks.contraction
    if (size % LANES and size != total) or total % size or (group < total and size % group):
        raise TPUKernelError(
            f"contraction={size} does not cut {total} padded rows (groups of {group}); it must be "
            f"a multiple of {LANES if group == total else group} that divides {total}."
        )


def _shapes(*arrays: jax.Array | None, is_stack: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of x, data, scales and codebook; of one matrix where they are of a stack."""
    x, *weight = arrays
    assert x is not None
    found = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    for array in weight:
        if array is not None:
            shape = array.shape[1:] if is_stack else array.shape
            found.append(jax.ShapeDtypeStruct(shape, array.dtype))
    return tuple(found)
