"""The quantized matmul as a TPU kernel: weights are read packed and unpacked only in VMEM."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....errors import TPUKernelError
from ....hardware.stored_formats import WEIGHT_FORMATS, StoredFormat
from ....hardware.target import current_target
from ...blocks.tiling import LANES, Interpret, Ref, round_up, tile_dot, tile_shape
from ...blocks.tuned import blocks_for
from ...blocks.vmem import vmem_capacity_bytes, vmem_limit_bytes
from ...registry.op import BlockSizes, KernelCase, shape_bucket
from .weight import Activations, padded_rows, quantize_rows

ROWS = (512, 256, 128, 64, 32)
COLUMNS = (1024, 512, 256, 128)
CONTRACTION = (2048, 1024, 512, 256, 128)
# Values that a kernel can take out of words of 32 bits.
_UNPACKED_BITS = (4, 8)


@dataclass(frozen=True)
class QuantizedBlocks(BlockSizes):
    """Rows of x, columns of the weight, and the part of the contraction in one grid step."""

    rows: int
    columns: int
    contraction: int


def can_multiply(format: str) -> bool:
    """Whether the kernel can unpack weights of this format; XLA multiplies any other."""
    return WEIGHT_FORMATS[format].values.bits in _UNPACKED_BITS


def bucket(case: KernelCase) -> str:
    """Return the bucket by shapes, where few rows count as one tile, as decoding has them."""
    x, *others = case.arguments
    rows = max(x.shape[0], tile_shape(jnp.int8)[0])
    padded = jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype)
    return shape_bucket(KernelCase(case.name, (padded, *others), case.options))


def vmem_bytes(case: KernelCase, blocks: QuantizedBlocks) -> int:
    """Return the VMEM: x, packed weight and result twice, the unpacked weight, sum and addend."""
    x, data = case.arguments[:2]
    elements = blocks.contraction * blocks.columns
    stored = data.size * jnp.dtype(data.dtype).itemsize
    packed = elements * stored // (padded_rows(case.options["format"], data) * data.shape[-1])
    # Codes or words in 32 bits, values in bfloat16.
    unpacked = 3 * elements
    x_bytes = blocks.rows * blocks.contraction * 2
    out = blocks.rows * blocks.columns * jnp.dtype(x.dtype).itemsize
    sums = 2 * blocks.rows * blocks.columns * 4
    return 2 * (x_bytes + packed + out) + unpacked + sums


def default_blocks(case: KernelCase, chip: str | None) -> QuantizedBlocks:
    """Return all rows up to 512, and as much of the weight as fits in half of VMEM."""
    budget = vmem_capacity_bytes(chip) // 2
    space = _candidates(case, chip)
    return next((blocks for blocks in space if vmem_bytes(case, blocks) <= budget), space[-1])


def block_space(case: KernelCase, chip: str) -> list[QuantizedBlocks]:
    """Return the combinations of rows, columns and contraction that fit."""
    budget = vmem_capacity_bytes(chip)
    return [blocks for blocks in _candidates(case, chip) if vmem_bytes(case, blocks) <= budget]


def _candidates(case: KernelCase, chip: str | None) -> list[QuantizedBlocks]:
    x, data = case.arguments[:2]
    format: Any = case.options["format"]
    total = padded_rows(format, data)
    group = total // case.arguments[2].shape[0]
    tallest = round_up(x.shape[0], tile_shape(jnp.int8, chip)[0])
    rows = list(dict.fromkeys(min(size, tallest) for size in ROWS))
    columns = list(dict.fromkeys(min(size, round_up(data.shape[-1], LANES)) for size in COLUMNS))
    step = LANES if WEIGHT_FORMATS[format].block is None else group
    sums = [size for size in CONTRACTION if total % size == 0 and size % step == 0]
    candidates = [QuantizedBlocks(r, c, k) for r in rows for c in columns for k in (sums or [step])]
    # Most rows first, because each block of rows unpacks the weight again; then nearly square ones.
    return sorted(candidates, key=lambda b: (-b.rows, -min(b.columns, b.contraction), -b.columns))


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
    """Multiply (M, K) by a weight of padded (K, N), as `quantized_matmul` does."""
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
    # Scales of a block are a dimension of their own, because they are too few rows for tiles of 8.
    groups = max(1, chosen.contraction // group)
    by_block = scales.reshape(*scales.shape[:-2], -1, groups, columns)
    weight = [data, by_block] if codebook is None else [data, by_block, codebook]
    integer_sum = activations == "int8" and WEIGHT_FORMATS[format].block is None
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


def _kernel(*refs: Ref, format: str, sticks_out: bool) -> None:
    *arrays, out, total = refs
    stored = WEIGHT_FORMATS[format]
    codebook = arrays.pop() if stored.has_codebook else None
    x, row_scales, data, scales = arrays[-4:]  # before them, the number of the matrix in a stack
    step, steps = pl.program_id(2), pl.num_programs(2)

    @pl.when(step == 0)
    def _start() -> None:
        total[...] = jnp.zeros(total.shape, total.dtype)

    if stored.block is not None:
        parts = [_group(x, data, scales, group, stored) for group in range(scales.shape[1])]
    elif codebook is not None:
        # Stages are added after the matmul, because the vector unit cannot add int8.
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
        if stored.block is None:
            result = result * scales[0]
        out[...] = result.astype(out.dtype)


def _group(x: Any, data: Any, scales: Any, group: int, stored: StoredFormat) -> jax.Array:
    size = x.shape[1] // scales.shape[1]
    words = size // stored.values_per_element
    packed = data[group * words : (group + 1) * words, :]
    values = pltpu.bitcast(packed, jnp.dtype(stored.values.name)).astype(x.dtype)
    product = tile_dot(x[:, group * size : (group + 1) * size], values)
    return product.astype(jnp.float32) * scales[0, group : group + 1, :]


def _decoded(codebook: Any, codes: Any, stage: int, *, mask: bool) -> jax.Array:
    """Return int8 values of a block of codes: words by lane permutation, spread over rows."""
    tables = codebook.shape[1]
    decoded: list[jax.Array] = []
    for start in range(0, codes.shape[2], LANES):
        code = codes[stage, :, start : start + LANES].astype(jnp.int32)
        # Codes past the last column are undefined, but must stay in range.
        lane = code & (LANES - 1) if mask or tables > 1 else code
        words: jax.Array | None = None
        for table in range(tables):
            entries = codebook[stage, table : table + 1, :]
            taken = jnp.take_along_axis(
                jnp.broadcast_to(entries, lane.shape), lane, axis=1, mode="promise_in_bounds"
            )
            words = taken if words is None else jnp.where(code >> 7 == table, taken, words)
        assert words is not None
        decoded.append(words)
    return pltpu.bitcast(jnp.concatenate(decoded, axis=1), jnp.int8)


def _weight_specs(case: KernelCase, blocks: QuantizedBlocks, groups: int) -> list[pl.BlockSpec]:
    """Return the block specs of data, scales and, if there is one, codebook."""
    format, data = case.options["format"], case.arguments[1]
    stored = WEIGHT_FORMATS[format]
    height = blocks.contraction // stored.values_per_element
    scaled = pl.BlockSpec(
        (1, groups, blocks.columns),
        (lambda i, j, k: (0, 0, j)) if stored.block is None else (lambda i, j, k: (k, 0, j)),
    )
    if not stored.has_codebook:
        return [pl.BlockSpec((height, blocks.columns), lambda i, j, k: (k, j)), scaled]
    codes = pl.BlockSpec((data.shape[0], height, blocks.columns), lambda i, j, k: (0, k, j))
    return [codes, scaled, pl.BlockSpec(case.arguments[3].shape, lambda i, j, k: (0, 0, 0))]


def _of_stack(spec: pl.BlockSpec) -> pl.BlockSpec:
    """Return the same block of the matrix whose number is prefetched."""
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
    # Tuned for sizes up to a power of two, which this size need not be; and a device's shard of the
    # contraction need not be full tiles.
    total = case.arguments[0].shape[1]
    size = math.gcd(chosen.contraction, total)
    return replace(chosen, contraction=total if size % LANES else size)


def _check(blocks: QuantizedBlocks, total: int, group: int) -> None:
    size = blocks.contraction
    if (size % LANES and size != total) or total % size or (group < total and size % group):
        raise TPUKernelError(
            f"contraction={size} does not divide {total} padded rows (groups of {group}); it must "
            f"be a multiple of {LANES if group == total else group} that divides {total}."
        )


def _shapes(*arrays: jax.Array | None, is_stack: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes of x, data, scales and codebook; of one matrix if they are of a stack."""
    x, *weight = arrays
    assert x is not None
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    for array in weight:
        if array is not None:
            shape = array.shape[1:] if is_stack else array.shape
            shapes.append(jax.ShapeDtypeStruct(shape, array.dtype))
    return tuple(shapes)
