"""Block sizes of the tiled matmul: what they occupy, and which to take."""

from dataclasses import dataclass

import jax.numpy as jnp

from ...blocks.tiling import LANES, round_up, tile_shape
from ...blocks.vmem import vmem_capacity_bytes
from ...registry.op import BlockSizes, KernelCase

ROWS = (1024, 512, 256, 128)
CONTRACTION = (2048, 1024, 512, 256, 128)


@dataclass(frozen=True)
class GemmBlocks(BlockSizes):
    """Rows of a, columns of b, and how much of the sum one grid step takes."""

    rows: int
    columns: int
    contraction: int


def vmem_bytes(case: KernelCase, blocks: GemmBlocks) -> int:
    """Operands and result twice, the sum and its addend."""
    itemsize = jnp.dtype(case.arguments[0].dtype).itemsize
    operands = 2 * (blocks.rows + blocks.columns) * blocks.contraction * itemsize
    # The result has at most 32 bits, whatever its dtype.
    return operands + 4 * blocks.rows * blocks.columns * 4


def default_blocks(case: KernelCase, chip: str | None) -> GemmBlocks:
    """The largest square of the result with the most of the sum, in half of VMEM."""
    space = _candidates(case, chip)
    budget = vmem_capacity_bytes(chip) // 2
    return next((blocks for blocks in space if vmem_bytes(case, blocks) <= budget), space[-1])


def block_space(case: KernelCase, chip: str) -> list[GemmBlocks]:
    """What fits of rows × columns × contraction."""
    budget = vmem_capacity_bytes(chip)
    return [blocks for blocks in _candidates(case, chip) if vmem_bytes(case, blocks) <= budget]


def _candidates(case: KernelCase, chip: str | None) -> list[GemmBlocks]:
    a, b = case.arguments[:2]
    (rows, width), columns = a.shape, b.shape[1]
    width = round_up(width, LANES)
    tallest = round_up(rows, tile_shape(jnp.int8, chip)[0])  # whatever the operands' format
    heights = dict.fromkeys(min(size, tallest) for size in ROWS)
    widths = dict.fromkeys(min(size, round_up(columns, LANES)) for size in ROWS)
    sums = [size for size in CONTRACTION if width % size == 0]
    found = [GemmBlocks(r, c, k) for r in heights for c in widths for k in sums]
    return sorted(
        found, key=lambda b: (-min(b.rows, b.columns), -b.rows * b.columns, -b.contraction)
    )
