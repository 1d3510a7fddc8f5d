"""Blocks of the gated feed-forward kernel: which there are, what they take, which are safe."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ...blocks.tiling import LANES, round_up, tile_shape
from ...blocks.vmem import scoped_limit_bytes, vmem_capacity_bytes
from ...registry.op import BlockSizes, KernelCase, shape_bucket


@dataclass(frozen=True)
class GatedBlocks(BlockSizes):
    """Sizes of one grid step: tokens, hidden channels, and channels that are summed over."""

    block_rows: int
    block_hidden: int
    block_width: int


def sizes_of(case: KernelCase) -> tuple[int, int, int]:
    """Tokens, model width and hidden width."""
    *leading, width = case.arguments[0].shape
    return math.prod(leading), width, case.arguments[1].shape[1]


def bucket(case: KernelCase) -> str:
    """The three sizes decide, however the tokens are stacked."""
    rows, width, hidden = sizes_of(case)
    shape = jax.ShapeDtypeStruct((rows, width, hidden), case.arguments[0].dtype)
    return shape_bucket(KernelCase(case.name, (shape,)))


def fitted(blocks: GatedBlocks, rows: int, width: int, hidden: int) -> GatedBlocks:
    """The blocks cut to the arrays: a sum must be over whole blocks, or over all at once."""
    step = blocks.block_width
    while step > LANES and width % step:
        step //= 2
    return GatedBlocks(
        block_rows=min(blocks.block_rows, round_up(rows, tile_shape("int8")[0])),
        block_hidden=min(blocks.block_hidden, round_up(hidden, LANES)),
        block_width=width if width % step or step % LANES else step,
    )


def vmem_bytes(case: KernelCase, blocks: GatedBlocks) -> int:
    """VMEM of the backward pass, which takes more: one further block read and three written."""
    sizes = fitted(blocks, *sizes_of(case))
    item = jnp.dtype(case.arguments[0].dtype).itemsize
    inputs = sizes.block_rows * sizes.block_width + 2 * sizes.block_width * sizes.block_hidden
    tiles = 4 * sizes.block_rows * sizes.block_hidden
    return 2 * item * (inputs + tiles) + 2 * 4 * sizes.block_rows * sizes.block_hidden


def block_space(case: KernelCase, chip: str) -> Iterator[GatedBlocks]:
    """Powers of two; larger ones read the matrices less often."""
    seen: set[GatedBlocks] = set()
    for rows in (128, 256, 512, 1024, 2048):
        for hidden in (256, 512, 1024):
            for width in (512, 1024, 2048):
                sizes = fitted(GatedBlocks(rows, hidden, width), *sizes_of(case))
                if sizes not in seen:
                    seen.add(sizes)
                    yield sizes


def default_blocks(case: KernelCase, chip: str | None) -> GatedBlocks:
    """The blocks that read least from HBM among those the compiler's own limit lets in."""
    limit = min(scoped_limit_bytes(chip), vmem_capacity_bytes(chip))
    space = list(block_space(case, chip or "v5e"))
    fitting = [sizes for sizes in space if vmem_bytes(case, sizes) <= limit]
    if not fitting:
        return min(space, key=lambda sizes: vmem_bytes(case, sizes))
    return min(fitting, key=lambda sizes: (read_bytes(case, sizes), -sizes.block_width))


def read_bytes(case: KernelCase, blocks: GatedBlocks) -> int:
    """Bytes the forward kernel reads: tokens once a block of channels, matrices once of tokens."""
    rows, width, hidden = sizes_of(case)
    item = jnp.dtype(case.arguments[0].dtype).itemsize
    over_hidden = -(-hidden // blocks.block_hidden)
    over_rows = -(-rows // blocks.block_rows)
    return item * (rows * width * over_hidden + 2 * width * hidden * over_rows)
