"""Blocks of the kernels that normalise whole rows: which there are, what they take, which fit."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError
from ....hardware.target import current_target
from ...blocks.tiling import LANES, round_up, tile_shape, word_sublanes
from ...blocks.vmem import vmem_capacity_bytes
from ...registry.op import PALLAS_TPU, BlockSizes, KernelCase, shape_bucket

# Long enough to hide the start of a copy, short enough that the first one is not waited for long.
WINDOW_BYTES = 2 * 2**20
# Static timing of norms of 2048 and 4096 wide rows: where memory is this fast, a step of 2 MiB is
# over before the next one has begun well, and twice as much gains 2 to 13 %.
LARGE_WINDOW_BYTES = {"v6e": 4 * 2**20, "7x": 4 * 2**20}
LARGE_WINDOWS = 16  # so many, or waiting for the first and the last takes what they gain
DTYPES = ("float32", "bfloat16")
MANY_ROWS = 8192  # more of them are more of the same: their blocks are the best ones of these


@dataclass(frozen=True)
class RowBlocks(BlockSizes):
    """How many rows one grid step normalises."""

    block_rows: int


def row_case(x: Any, *, residual: bool = False) -> KernelCase:
    """The case of an array at hand, for choosing blocks; twice where a stream is added to."""
    return KernelCase("rows", (jax.ShapeDtypeStruct(x.shape, x.dtype),) * (1 + residual))


def bucket(case: KernelCase) -> str:
    """Rows and width decide: neither how the rows are stacked nor the parameters do."""
    x = case.arguments[0]
    rows, width = matrix_shape(x.shape)
    matrix = jax.ShapeDtypeStruct((min(rows, MANY_ROWS), width), x.dtype)
    return shape_bucket(KernelCase(case.name, (matrix,)))


def default_blocks(case: KernelCase, chip: str | None) -> RowBlocks:
    """Windows of 2 or 4 MiB, fewer rows where the backward pass would not fit."""
    rows, width = matrix_shape(case.arguments[0].shape)
    dtype = case.arguments[0].dtype
    step = tile_shape(dtype, chip)[0]
    window = LARGE_WINDOW_BYTES.get(chip or "", WINDOW_BYTES)
    if rows * _row_bytes(width, dtype) < LARGE_WINDOWS * window:
        window = WINDOW_BYTES
    block = max(step, window // _row_bytes(width, dtype) // step * step)
    block = min(block, round_up(rows, step))
    while block > step and vmem_bytes(case, RowBlocks(block)) > vmem_capacity_bytes(chip):
        block = max(step, block // 2 // step * step)
    return RowBlocks(block)


def block_space(case: KernelCase, chip: str) -> list[RowBlocks]:
    """Powers of two from one tile to all rows."""
    rows, _ = matrix_shape(case.arguments[0].shape)
    step = tile_shape(case.arguments[0].dtype, chip)[0]
    sizes = [step]
    while sizes[-1] < min(rows, 4096):
        sizes.append(sizes[-1] * 2)
    return [RowBlocks(size) for size in sizes]


def vmem_bytes(case: KernelCase, blocks: RowBlocks) -> int:
    """VMEM of the backward pass, which takes more: three windows, and the sums over rows.

    A second array like the first is added to it, and has a fourth window in both passes.
    """
    first = case.arguments[0]
    windows = 2 + sum(array.shape == first.shape for array in case.arguments)
    _, width = matrix_shape(case.arguments[0].shape)
    window = blocks.block_rows * _row_bytes(width, case.arguments[0].dtype)
    lines = word_sublanes() * round_up(width, LANES) * 4
    # The scale, and the sums for scale and bias: all double-buffered, as the windows are.
    return 2 * (windows * window + 3 * lines)


def check_arguments(
    op: str,
    x: jax.Array,
    parameters: tuple[jax.Array | None, ...],
    implementation: str | None,
    *,
    use_fused_ops: bool,
) -> None:
    """Refuse parameters of another width, and a kernel that is asked for and cannot be had.

    Raises:
        TPUKernelError: With what was seen and what is supported.
    """
    for parameter in parameters:
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise TPUKernelError(
                f"{op} of x {x.shape} takes parameters of the shape {x.shape[-1:]} and got "
                f"{parameter.shape}; they belong to the last axis."
            )
    if implementation is not None and not use_fused_ops:
        raise TPUKernelError(
            f"{op} was given implementation={implementation!r} and use_fused_ops=False; give one "
            "of the two."
        )
    if implementation == PALLAS_TPU and x.dtype not in DTYPES:
        raise TPUKernelError(
            f"The kernel of {op} takes {' or '.join(DTYPES)} and x is {x.dtype.name}; cast it, or "
            "use implementation='reference'."
        )
    if implementation == PALLAS_TPU and x.size and not fits(x, current_target()):
        raise TPUKernelError(
            f"The kernel of {op} holds whole rows, and {tile_shape(x.dtype)[0]} rows of "
            f"{x.shape[-1]} do not fit in the VMEM of {current_target() or 'every generation'}; "
            "use implementation='reference'."
        )


def fits(x: Any, chip: str | None, *, residual: bool = False) -> bool:
    """Whether the kernel takes such rows: their dtype, and one tile of them in VMEM."""
    if x.dtype not in DTYPES or not x.size:
        return False
    case = row_case(x, residual=residual)
    smallest = RowBlocks(tile_shape(x.dtype, chip)[0])
    return vmem_bytes(case, smallest) <= vmem_capacity_bytes(chip)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and width, however the rows are stacked."""
    return math.prod(shape[:-1]), shape[-1]


def _row_bytes(width: int, dtype: Any) -> int:
    return round_up(width, LANES) * jnp.dtype(dtype).itemsize
