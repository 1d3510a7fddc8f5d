"""Block sizes of the grouped matmul and its gradients: what they occupy, and which to take."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax.numpy as jnp

from ..op import BlockSizes, KernelCase
from ..tiling import LANES, round_up
from ..vmem import vmem_capacity_bytes

# The fastest of published tuning runs (tokamax, bfloat16) keep the whole contraction in one tile,
# a weight tile of 7 MiB on chips whose matrix unit is 256 wide and of half that on the others,
# and 512 or 128 rows; sums of the weight's gradient take some 2 million elements.
WEIGHT_BYTES = {"v6e": 7 * 2**20 + 2**19, "7x": 7 * 2**20 + 2**19}
ROWS = {"v6e": 512, "7x": 512}
OTHER_WEIGHT_BYTES, OTHER_ROWS = 3 * 2**20 + 2**19, 128
SUM_ELEMENTS = 2 * 2**20
SUBLANES = 16


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


def even_tile(size: int, most: int) -> int:
    """The tile that cuts `size` into as few equal parts of at most `most` as can be.

    The whole of it needs no padding; a part is a multiple of 128.
    """
    if size <= most:
        return size
    parts = -(-size // max(most // LANES * LANES, LANES))
    return round_up(-(-size // parts), LANES)


def default_blocks(case: KernelCase, chip: str | None) -> GroupedBlocks:
    """What published tuning runs found, made smaller until it fits three quarters of VMEM."""
    budget = vmem_capacity_bytes(chip) * 3 // 4
    return next(
        (blocks for blocks in _shrinking(case, chip) if vmem_bytes(case, blocks) <= budget),
        _blocks(case, SUBLANES, LANES * LANES, LANES * LANES),
    )


def block_space(case: KernelCase, chip: str) -> list[GroupedBlocks]:
    """Rows and tile areas around the default, product and gradients varied apart."""
    first = default_blocks(case, chip)
    capacity = vmem_capacity_bytes(chip)
    found = [first]
    for rows in (128, 256, 512, 1024):
        for weight in (2**20, 2**21, 2**22, 2**23):
            other = _blocks(case, rows, weight // 2, weight // 4)
            found.append(
                replace(
                    first, rows=other.rows, contraction=other.contraction, columns=other.columns
                )
            )
            found.append(
                replace(
                    first,
                    drhs_rows=other.drhs_rows,
                    drhs_contraction=other.drhs_contraction,
                    drhs_columns=other.drhs_columns,
                )
            )
    fitting = [blocks for blocks in found if vmem_bytes(case, blocks) <= capacity]
    return list(dict.fromkeys(fitting))


def _shrinking(case: KernelCase, chip: str | None) -> Iterator[GroupedBlocks]:
    itemsize = jnp.dtype(case.arguments[0].dtype).itemsize
    rows = ROWS.get(chip or "", OTHER_ROWS)
    weight = WEIGHT_BYTES.get(chip or "", OTHER_WEIGHT_BYTES) // itemsize
    sums = SUM_ELEMENTS
    while weight >= LANES * LANES:
        yield _blocks(case, rows, weight, sums)
        weight, sums = weight // 2, sums // 2
        rows = max(rows // 2, LANES)


def _blocks(case: KernelCase, rows: int, weight_elements: int, sum_elements: int) -> GroupedBlocks:
    """Blocks with so many rows, elements of a weight tile and elements of a sum over rows."""
    lhs, rhs = case.arguments[:2]
    _, width, columns = rhs.shape
    rows = min(rows, round_up(lhs.shape[0], SUBLANES))
    # Half the area at most is one tile's contraction, or few columns would share it.
    contraction = even_tile(width, max(LANES, weight_elements // LANES))
    dlhs_contraction = even_tile(columns, max(LANES, weight_elements // LANES))
    drhs_columns = even_tile(columns, max(LANES, min(2048, sum_elements // LANES)))
    return GroupedBlocks(
        rows=rows,
        contraction=contraction,
        columns=even_tile(columns, max(LANES, weight_elements // contraction)),
        dlhs_contraction=dlhs_contraction,
        dlhs_columns=even_tile(width, max(LANES, weight_elements // dlhs_contraction)),
        drhs_rows=min(rows, 256),
        drhs_contraction=even_tile(width, max(LANES, sum_elements // drhs_columns)),
        drhs_columns=drhs_columns,
    )
