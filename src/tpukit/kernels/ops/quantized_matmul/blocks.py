"""Block sizes of the quantized matmul: what they occupy, and which to take."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...blocks.tiling import LANES, round_up, tile_shape
from ...blocks.vmem import vmem_capacity_bytes
from ...registry.op import BlockSizes, KernelCase, shape_bucket
from .weight import padded_rows

ROWS = (512, 256, 128, 64, 32)
COLUMNS = (1024, 512, 256, 128)
CONTRACTION = (2048, 1024, 512, 256, 128)


@dataclass(frozen=True)
class QuantizedBlocks(BlockSizes):
    """Rows of x, columns of the weight, and how much of the sum one grid step takes."""

    rows: int
    columns: int
    contraction: int


def bucket(case: KernelCase) -> str:
    """The shapes, but few rows are as good as one tile of them: a decoding step has any number."""
    x, *others = case.arguments
    rows = max(x.shape[0], tile_shape(jnp.int8)[0])
    padded = jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype)
    return shape_bucket(KernelCase(case.name, (padded, *others), case.options))


def vmem_bytes(case: KernelCase, blocks: QuantizedBlocks) -> int:
    """x, packed weight and result twice, the weight once unpacked, the sum and its addend."""
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
    """All rows up to 512, and as much of the weight as half of VMEM holds."""
    budget = vmem_capacity_bytes(chip) // 2
    space = _candidates(case, chip)
    return next((blocks for blocks in space if vmem_bytes(case, blocks) <= budget), space[-1])


def block_space(case: KernelCase, chip: str) -> list[QuantizedBlocks]:
    """What fits of rows × columns × contraction."""
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
    step = group if format == "int4" else LANES
    sums = [size for size in CONTRACTION if total % size == 0 and size % step == 0]
    found = [QuantizedBlocks(r, c, k) for r in rows for c in columns for k in (sums or [step])]
    # Most rows first, because each block of rows unpacks the weight again; then square-ish ones.
    return sorted(found, key=lambda b: (-b.rows, -min(b.columns, b.contraction), -b.columns))
