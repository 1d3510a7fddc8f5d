"""Blocks of the rotating kernel: which there are, what they take, which are safe."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ...blocks.tiling import LANES, round_up, tile_shape
from ...blocks.vmem import vmem_capacity_bytes
from ...registry.op import BlockSizes, KernelCase, shape_bucket

WINDOW_BYTES = 2 * 2**20
MANY_TOKENS = 4096  # more of them are more of the same, whose blocks are as good


@dataclass(frozen=True)
class RopeBlocks(BlockSizes):
    """How many tokens one grid step rotates."""

    block_tokens: int


def bucket(case: KernelCase) -> str:
    """Tokens and heads decide; the batch only repeats them, and the tables follow."""
    _, tokens, *heads = case.arguments[0].shape
    shape = jax.ShapeDtypeStruct((min(tokens, MANY_TOKENS), *heads), case.arguments[0].dtype)
    return shape_bucket(KernelCase(case.name, (shape,)))


def default_blocks(case: KernelCase, chip: str | None) -> RopeBlocks:
    """Windows of about 2 MiB."""
    x = case.arguments[0]
    step = tile_shape(x.dtype)[0]
    row_bytes = x.shape[2] * x.shape[3] * jnp.dtype(x.dtype).itemsize
    block = max(step, WINDOW_BYTES // row_bytes // step * step)
    block = min(block, round_up(x.shape[1], step))
    while block > step and vmem_bytes(case, RopeBlocks(block)) > vmem_capacity_bytes(chip):
        block = max(step, block // 2 // step * step)
    return RopeBlocks(block)


def block_space(case: KernelCase, chip: str) -> list[RopeBlocks]:
    """Powers of two from one tile to all tokens."""
    sizes = [tile_shape(case.arguments[0].dtype)[0]]
    while sizes[-1] < min(case.arguments[0].shape[1], 2048):
        sizes.append(sizes[-1] * 2)
    return [RopeBlocks(size) for size in sizes]


def vmem_bytes(case: KernelCase, blocks: RopeBlocks) -> int:
    """Two windows and the tables, double-buffered."""
    _, _, heads, width = case.arguments[0].shape
    item = jnp.dtype(case.arguments[0].dtype).itemsize
    tables = 3 * max(width, LANES) * 4
    return 2 * blocks.block_tokens * (2 * heads * width * item + tables)
