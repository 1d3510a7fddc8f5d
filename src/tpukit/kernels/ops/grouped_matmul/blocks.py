"""Block sizes of the grouped matmul and its gradients: their VMEM, and which to choose."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import jax.numpy as jnp

from ....hardware import get_chip
from ....hardware.catalog import CHIP_FOR_KERNEL_BLOCKS
from ....hardware.rates import ChipRates
from ...blocks.tiling import LANES, round_up, tile_shape
from ...blocks.vmem import vmem_capacity_bytes
from ...registry.op import BlockSizes, KernelCase

Tiles = tuple[int, int, int]  # rows, and the two sizes of a kernel's weight tile


@dataclass(frozen=True)
class GroupedShape:
    """A grouped matmul of rows (M, width) with weights (groups, width, columns).

    Attributes:
        rows: Rows that belong to a group.
        width: Contracted size.
        columns: Columns of the weights.
        groups: Number of groups.
        itemsize: Bytes per element.
        empty_rows: Rows of no group, whose results are only written.
    """

    rows: int
    width: int
    columns: int
    groups: int
    itemsize: int
    empty_rows: int = 0

    @property
    def transposed(self) -> "GroupedShape":
        """The shape of the gradient of lhs, with width and columns exchanged."""
        return replace(self, width=self.columns, columns=self.width)


@dataclass(frozen=True)
class GroupedWork:
    """The work of one kernel.

    Attributes:
        flops: FLOPs of full tiles, as the matrix unit computes them.
        hbm_bytes: Bytes read and written.
        steps: Steps of its grid.
        parts: Size of the grid's first dimension, which the cores of a device share.
    """

    flops: int
    hbm_bytes: int
    steps: int
    parts: int


def product_work(shape: GroupedShape, tiles: Tiles) -> GroupedWork:
    """Return the work of the matmul, or of the gradient of lhs with width and columns exchanged.

    The grid iterates over the columns, the visits and the contraction, so a weight tile with all of
    the contraction stays in VMEM for its group.
    """
    tile_rows, tile_sum, tile_columns = tiles
    visits = _visits(shape, tile_rows)
    sums, across = -(-shape.width // tile_sum), -(-shape.columns // tile_columns)
    padded = sums * tile_sum * across * tile_columns
    weights = padded * (shape.groups if sums == 1 else visits)
    rows = (shape.rows if sums == 1 else visits * tile_rows) * sums * tile_sum * across
    moved = weights + rows + (shape.rows + shape.empty_rows) * shape.columns
    return GroupedWork(
        flops=2 * visits * tile_rows * padded,
        hbm_bytes=moved * shape.itemsize,
        steps=visits * sums * across,
        parts=across,
    )


def drhs_work(shape: GroupedShape, tiles: Tiles) -> GroupedWork:
    """Return the work of the gradient of the weights, a sum over the visits of each group."""
    tile_rows, tile_width, tile_columns = tiles
    visits = _visits(shape, tile_rows)
    down, across = -(-shape.width // tile_width), -(-shape.columns // tile_columns)
    width, columns = down * tile_width, across * tile_columns
    read = visits * tile_rows * (width * across + columns * down)
    written = shape.groups * shape.width * shape.columns
    return GroupedWork(
        flops=2 * visits * tile_rows * width * columns,
        hbm_bytes=(read + written) * shape.itemsize,
        steps=visits * down * across,
        parts=down,
    )


def _visits(shape: GroupedShape, tile_rows: int) -> int:
    """Return the number of tiles, plus one visit per further group, which begins inside a tile."""
    return -(-shape.rows // tile_rows) + shape.groups - 1


ROWS = (128, 256, 512, 1024)
SIDES = (256, 512, 1024, 2048, 4096)
# Larger tiles gain nothing and take the compiler minutes, because it unrolls a tile's matmuls.
MOST_MULTIPLIED = 2**32
# Rows, in multiples of the matrix unit's side, below which it waits for its next weights: compiled
# kernels with 256 rows take 1.5 times as long as those with 512 or 1024 on v6e.
ROWS_AT_FULL_RATE = 1.5
STEP_S = 2e-7  # one step of the grid, from compiled kernels


@dataclass(frozen=True)
class GroupedBlocks(BlockSizes):
    """Tile sizes of the matmul and of its two gradients.

    Attributes:
        rows: Rows of lhs, in the matmul and in the gradient of lhs.
        contraction: Part of K, in the matmul.
        columns: Part of N, in the matmul.
        dlhs_contraction: Part of N, in the gradient of lhs.
        dlhs_columns: Part of K, in the gradient of lhs.
        drhs_rows: Rows of lhs, in the gradient of rhs, which sums over them.
        drhs_contraction: Part of K, in the gradient of rhs.
        drhs_columns: Part of N, in the gradient of rhs.
    """

    rows: int
    contraction: int
    columns: int
    dlhs_contraction: int
    dlhs_columns: int
    drhs_rows: int
    drhs_contraction: int
    drhs_columns: int


def product_bytes(rows: int, contraction: int, columns: int, itemsize: int) -> int:
    """Return the VMEM of the matmul: operands and result twice, the sum and its addend."""
    operands = 2 * (rows + columns) * contraction * itemsize
    return operands + 2 * rows * columns * itemsize + 2 * rows * columns * 4


def drhs_bytes(rows: int, contraction: int, columns: int, itemsize: int) -> int:
    """Return the VMEM of the gradient of rhs: operands and result twice, the sum and its addend."""
    operands = 2 * rows * (contraction + columns) * itemsize
    # Both operands are masked, which copies them.
    masked = rows * (contraction + columns) * itemsize
    return operands + masked + contraction * columns * (2 * itemsize + 8)


def vmem_bytes(case: KernelCase, blocks: GroupedBlocks) -> int:
    """Return the VMEM of the largest kernel."""
    itemsize = jnp.dtype(case.arguments[0].dtype).itemsize
    return max(
        product_bytes(blocks.rows, blocks.contraction, blocks.columns, itemsize),
        product_bytes(blocks.rows, blocks.dlhs_contraction, blocks.dlhs_columns, itemsize),
        drhs_bytes(blocks.drhs_rows, blocks.drhs_contraction, blocks.drhs_columns, itemsize),
    )


def even_tile(size: int, most: int, *, unit: int = LANES) -> int:
    """Return the tile size that divides `size` into the fewest equal parts of at most `most`.

    A `size` of at most `most` is one part. Smaller parts are rounded up to multiples of `unit`.
    """
    if size <= most:
        return size
    parts = -(-size // max(most // unit * unit, unit))
    return round_up(-(-size // parts), unit)


def default_blocks(case: KernelCase, chip: str | None) -> GroupedBlocks:
    """Return the fastest tiles by arithmetic among those within three quarters of VMEM."""
    shape = _shape(case)
    choice = _TileChoice(chip)
    heights = (tile_shape(jnp.bfloat16, chip)[0], *ROWS)
    # The matmul and the gradient of lhs share their rows.
    forward, backward = min(
        ((choice.product(shape, rows), choice.product(shape.transposed, rows)) for rows in heights),
        key=lambda both: both[0].seconds + both[1].seconds,
    )
    drhs = min((choice.drhs(shape, rows) for rows in heights), key=_seconds)
    return GroupedBlocks(*forward.tiles, *backward.tiles[1:], *drhs.tiles)


def block_space(case: KernelCase, chip: str) -> list[GroupedBlocks]:
    """Return every combination of sizes that fits in VMEM, for the tuner."""
    first, shape, capacity = default_blocks(case, chip), _shape(case), vmem_capacity_bytes(chip)
    unit = _unit(chip)
    candidates = [first]
    for rows, side, other in product(ROWS, SIDES, SIDES):
        tiles = _tile(shape, rows, side, other, unit)
        transposed = (
            even_tile(shape.columns, side, unit=unit),
            even_tile(shape.width, other, unit=unit),
        )
        candidates.append(
            GroupedBlocks(
                *tiles, *transposed, first.drhs_rows, first.drhs_contraction, first.drhs_columns
            )
        )
        own = first.to_dict()
        names = ("drhs_rows", "drhs_contraction", "drhs_columns")
        own.update(zip(names, tiles, strict=True))
        candidates.append(GroupedBlocks(**own))
    fitting = [blocks for blocks in candidates if vmem_bytes(case, blocks) <= capacity]
    return list(dict.fromkeys(fitting))


class _Timed(NamedTuple):
    tiles: Tiles
    seconds: float


def _seconds(timed: _Timed) -> float:
    return timed.seconds


def _unit(chip: str | None) -> int:
    """Return the matrix unit's side length; without a chip the least of all generations."""
    return int(get_chip(chip).mxu_size.require("The blocks of a kernel")) if chip else LANES


class _TileChoice:
    """The fastest tiles on one generation; without one, for the slowest memory."""

    def __init__(self, chip: str | None) -> None:
        known = get_chip(chip or CHIP_FOR_KERNEL_BLOCKS)
        peak, memory = known.per_device(known.peak("bf16")), known.per_device(known.hbm_gbps)
        self._flops_per_s = peak.require("the blocks of a kernel") * 1e12
        reached = ChipRates.of(known.name).hbm_efficiency
        self._bytes_per_s = memory.require("the blocks of a kernel") * 1e9 * reached
        self._cores = known.cores_per_device
        self._budget = vmem_capacity_bytes(chip) * 3 // 4
        self._unit = _unit(chip)

    def product(self, shape: GroupedShape, rows: int) -> _Timed:
        """Return the tiles for the matmul with this many rows."""
        return self._fastest(shape, rows, product_work, product_bytes)

    def drhs(self, shape: GroupedShape, rows: int) -> _Timed:
        """Return the tiles for the gradient of the weights."""
        return self._fastest(shape, rows, drhs_work, drhs_bytes)

    def _fastest(
        self,
        shape: GroupedShape,
        rows: int,
        work: Callable[[GroupedShape, Tiles], GroupedWork],
        vmem: Callable[[int, int, int, int], int],
    ) -> _Timed:
        candidates = [_tile(shape, rows, *sides, self._unit) for sides in product(SIDES, SIDES)]
        timed = [
            self._timed(work(shape, tiles), tiles)
            for tiles in candidates
            if math.prod(tiles) <= MOST_MULTIPLIED and vmem(*tiles, shape.itemsize) <= self._budget
        ]
        return min(timed, key=_seconds, default=_Timed(candidates[0], math.inf))

    def _timed(self, work: GroupedWork, tiles: Tiles) -> _Timed:
        waits = max(1.0, ROWS_AT_FULL_RATE * self._unit / tiles[0])
        idle = -(-work.parts // self._cores) * self._cores / work.parts
        products = work.flops * waits * idle / self._flops_per_s
        busy = max(products, work.hbm_bytes / self._bytes_per_s)
        return _Timed(tiles, busy + work.steps * STEP_S)


def _shape(case: KernelCase) -> GroupedShape:
    lhs, rhs = case.arguments[:2]
    groups, width, columns = rhs.shape
    return GroupedShape(lhs.shape[0], width, columns, groups, jnp.dtype(lhs.dtype).itemsize)


def _tile(shape: GroupedShape, rows: int, side: int, other: int, unit: int) -> Tiles:
    return (
        min(rows, round_up(shape.rows, tile_shape(jnp.bfloat16)[0])),
        even_tile(shape.width, side, unit=unit),
        even_tile(shape.columns, other, unit=unit),
    )
