"""Block sizes of the grouped matmul and its gradients: what they occupy, and which to take."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import jax.numpy as jnp

from ....hardware import get_chip
from ....hardware.rates import ChipRates
from ...blocks.tiling import LANES, round_up, tile_shape
from ...blocks.vmem import vmem_capacity_bytes
from ...registry.op import BlockSizes, KernelCase
from .work import GroupedShape, GroupedWork, Tiles, drhs_work, product_work

ROWS = (128, 256, 512, 1024)
SIDES = (256, 512, 1024, 2048, 4096)
# Larger tiles gain nothing and take the compiler minutes: it unrolls a tile's products.
MOST_MULTIPLIED = 2**32
# Fewer rows wait for the next weights of the matrix unit, in sides of it: compiled kernels with
# 256 rows take 1.5 times as long as ones with 512 or 1024 on v6e.
ROWS_AT_FULL_RATE = 1.5
STEP_S = 2e-7  # one step of the grid, by compiled kernels


@dataclass(frozen=True)
class GroupedBlocks(BlockSizes):
    """Tiles of the product and of its two gradients.

    Attributes:
        rows: Of lhs, in the product and in the gradient of lhs.
        contraction: Of K, in the product.
        columns: Of N, in the product.
        dlhs_contraction: Of N, in the gradient of lhs.
        dlhs_columns: Of K, in the gradient of lhs.
        drhs_rows: Of lhs, in the gradient of rhs, which sums over them.
        drhs_contraction: Of K, in the gradient of rhs.
        drhs_columns: Of N, in the gradient of rhs.
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
    """VMEM of the product: operands and result twice, the sum and its addend."""
    operands = 2 * (rows + columns) * contraction * itemsize
    return operands + 2 * rows * columns * itemsize + 2 * rows * columns * 4


def drhs_bytes(rows: int, contraction: int, columns: int, itemsize: int) -> int:
    """VMEM of the gradient of rhs: operands and result twice, the sum and its addend."""
    operands = 2 * rows * (contraction + columns) * itemsize
    # Both operands are masked, which makes a copy.
    masked = rows * (contraction + columns) * itemsize
    return operands + masked + contraction * columns * (2 * itemsize + 8)


def vmem_bytes(case: KernelCase, blocks: GroupedBlocks) -> int:
    """VMEM of the kernel that needs most."""
    itemsize = jnp.dtype(case.arguments[0].dtype).itemsize
    return max(
        product_bytes(blocks.rows, blocks.contraction, blocks.columns, itemsize),
        product_bytes(blocks.rows, blocks.dlhs_contraction, blocks.dlhs_columns, itemsize),
        drhs_bytes(blocks.drhs_rows, blocks.drhs_contraction, blocks.drhs_columns, itemsize),
    )


def even_tile(size: int, most: int, *, unit: int = LANES) -> int:
    """The tile that cuts `size` into as few equal parts of at most `most` as can be.

    The whole of it needs no padding; a part is a multiple of `unit`.
    """
    if size <= most:
        return size
    parts = -(-size // max(most // unit * unit, unit))
    return round_up(-(-size // parts), unit)


def default_blocks(case: KernelCase, chip: str | None) -> GroupedBlocks:
    """The tiles that take the least time by arithmetic, of those within three quarters of VMEM."""
    shape = _shape(case)
    choice = _TileChoice(chip)
    heights = (tile_shape(jnp.bfloat16, chip)[0], *ROWS)
    # The product and the gradient of lhs share their rows.
    forward, backward = min(
        ((choice.product(shape, rows), choice.product(shape.transposed, rows)) for rows in heights),
        key=lambda both: both[0].seconds + both[1].seconds,
    )
    drhs = min((choice.drhs(shape, rows) for rows in heights), key=_seconds)
    return GroupedBlocks(*forward.tiles, *backward.tiles[1:], *drhs.tiles)


def block_space(case: KernelCase, chip: str) -> list[GroupedBlocks]:
    """Every size at every value, within VMEM: the tuner goes from one to the next."""
    first, shape, capacity = default_blocks(case, chip), _shape(case), vmem_capacity_bytes(chip)
    unit = _unit(chip)
    found = [first]
    for rows, side, other in product(ROWS, SIDES, SIDES):
        tiles = _tile(shape, rows, side, other, unit)
        transposed = (
            even_tile(shape.columns, side, unit=unit),
            even_tile(shape.width, other, unit=unit),
        )
        found.append(
            GroupedBlocks(
                *tiles, *transposed, first.drhs_rows, first.drhs_contraction, first.drhs_columns
            )
        )
        own = first.to_dict()
        names = ("drhs_rows", "drhs_contraction", "drhs_columns")
        own.update(zip(names, tiles, strict=True))
        found.append(GroupedBlocks(**own))
    fitting = [blocks for blocks in found if vmem_bytes(case, blocks) <= capacity]
    return list(dict.fromkeys(fitting))


class _Timed(NamedTuple):
    tiles: Tiles
    seconds: float


def _seconds(timed: _Timed) -> float:
    return timed.seconds


def _unit(chip: str | None) -> int:
    """The matrix unit's side; the least of all generations where none is stated."""
    return int(get_chip(chip).mxu_size.require("The blocks of a kernel")) if chip else LANES


class _TileChoice:
    """The fastest tiles on one generation; where none is stated, on the slowest memory there is."""

    def __init__(self, chip: str | None) -> None:
        found = get_chip(chip or "v5e")
        peak, memory = found.per_device(found.peak("bf16")), found.per_device(found.hbm_gbps)
        self._flops_per_s = peak.require("the blocks of a kernel") * 1e12
        reached = ChipRates.of(found.name).hbm_efficiency
        self._bytes_per_s = memory.require("the blocks of a kernel") * 1e9 * reached
        self._cores = found.cores_per_device
        self._budget = vmem_capacity_bytes(chip) * 3 // 4
        self._unit = _unit(chip)

    def product(self, shape: GroupedShape, rows: int) -> _Timed:
        """For the product, with so many rows."""
        return self._fastest(shape, rows, product_work, product_bytes)

    def drhs(self, shape: GroupedShape, rows: int) -> _Timed:
        """For the gradient of the weights."""
        return self._fastest(shape, rows, drhs_work, drhs_bytes)

    def _fastest(
        self,
        shape: GroupedShape,
        rows: int,
        work: Callable[[GroupedShape, Tiles], GroupedWork],
        vmem: Callable[[int, int, int, int], int],
    ) -> _Timed:
        found = [_tile(shape, rows, *sides, self._unit) for sides in product(SIDES, SIDES)]
        timed = [
            self._timed(work(shape, tiles), tiles)
            for tiles in found
            if math.prod(tiles) <= MOST_MULTIPLIED and vmem(*tiles, shape.itemsize) <= self._budget
        ]
        return min(timed, key=_seconds, default=_Timed(found[0], math.inf))

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
