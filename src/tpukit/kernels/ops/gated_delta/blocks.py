"""Blocks of the gated delta kernel: which there are, what they take, which are safe."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ...blocks.tiling import LANES, round_up
from ...blocks.vmem import vmem_capacity_bytes
from ...registry.op import BlockSizes, KernelCase, shape_bucket

OP_NAME = "gated_delta"
# Matrices of a chunk then fill the lanes, and the matrix units of every generation.
CHUNK = 128
RATES = 8  # numbers of each token and head of values, a sublane each
# Heads of values whose chains of products fill each other's waits.
HEADS = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class DeltaBlocks(BlockSizes):
    """How many heads of keys one grid step takes, each with its heads of values."""

    key_heads: int


def group_of(case: KernelCase) -> int:
    """Heads of values for each head of keys."""
    return case.arguments[2].shape[2] // case.arguments[1].shape[2]


def bucket(case: KernelCase) -> str:
    """Heads and widths decide, not how many tokens or sequences there are."""
    q, v = case.arguments[0], case.arguments[2]
    shapes = (jax.ShapeDtypeStruct((*x.shape[2:],), x.dtype) for x in (q, v))
    return shape_bucket(KernelCase(case.name, tuple(shapes)))


def vmem_bytes(case: KernelCase, blocks: DeltaBlocks) -> int:
    """Of the backward pass, which takes more: windows twice, the state, and matrices of heads."""
    item = jnp.dtype(case.arguments[0].dtype).itemsize
    width, value_width = (round_up(case.arguments[at].shape[3], LANES) for at in (0, 2))
    heads = blocks.key_heads * group_of(case)
    state = heads * width * value_width
    # Queries, keys and their gradients; values, cotangents and gradients.
    tokens = item * CHUNK * (4 * blocks.key_heads * width + 3 * heads * value_width)
    rates = 2 * 4 * CHUNK * RATES * heads
    kept = item * (state + heads * CHUNK * CHUNK)
    windows = tokens + rates + kept + 2 * 4 * state
    return 2 * windows + 4 * state + 6 * 4 * heads * CHUNK * CHUNK


def block_space(case: KernelCase, chip: str) -> Iterator[DeltaBlocks]:
    """Divisors of the heads of keys that give one of the numbers of heads, and that fit."""
    key_heads, group = case.arguments[1].shape[2], group_of(case)
    for heads in HEADS:
        ours = heads // group
        if ours and key_heads % ours == 0:
            blocks = DeltaBlocks(ours)
            if vmem_bytes(case, blocks) <= vmem_capacity_bytes(chip):
                yield blocks


def default_blocks(case: KernelCase, chip: str | None) -> DeltaBlocks:
    """As many heads as half of VMEM holds; one head of keys at least."""
    limit = vmem_capacity_bytes(chip) // 2
    space = block_space(case, chip or "v5e")
    return next((b for b in space if vmem_bytes(case, b) <= limit), DeltaBlocks(1))
