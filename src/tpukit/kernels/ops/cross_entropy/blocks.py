"""Block sizes of the cross-entropy kernels: what they occupy, and which to take."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax.numpy as jnp

from ...blocks.tiling import LANES, round_up, tile_shape
from ...blocks.vmem import vmem_capacity_bytes
from ...registry.op import BlockSizes, KernelCase

# Large blocks first: a block of tokens reads the whole head once, so many tokens must share it.
TOKENS = (1024, 512, 256, 128, 64, 32)
VOCAB = (2048, 1024, 512, 256, 128)


@dataclass(frozen=True)
class CrossEntropyBlocks(BlockSizes):
    """Tokens and columns of one block of logits, forward and backward."""

    tokens: int
    vocab: int
    backward_tokens: int
    backward_vocab: int


def forward_bytes(width: int, itemsize: int, tokens: int, vocab: int) -> int:
    """VMEM of the forward kernel: both operands twice, lane statistics, logits in float32."""
    operands = 2 * width * (tokens + vocab) * itemsize
    return operands + 7 * tokens * LANES * 4 + 2 * tokens * vocab * 4


def backward_bytes(width: int, itemsize: int, tokens: int, vocab: int) -> int:
    """VMEM of the larger backward kernel: operands and result twice, and the sum in float32."""
    operands = 2 * width * (tokens + vocab) * itemsize
    result = max(tokens, vocab) * width * (2 * itemsize + 4)
    # The product that is added to the sum is as large as it.
    return operands + result + max(tokens, vocab) * width * 4 + 3 * tokens * vocab * 4


def vmem_bytes(case: KernelCase, blocks: CrossEntropyBlocks) -> int:
    """VMEM of the kernel that needs most."""
    width, itemsize = _width_and_itemsize(case)
    return max(
        forward_bytes(width, itemsize, blocks.tokens, blocks.vocab),
        backward_bytes(width, itemsize, blocks.backward_tokens, blocks.backward_vocab),
    )


def default_blocks(case: KernelCase, chip: str | None) -> CrossEntropyBlocks:
    """The largest nearly square blocks that leave a quarter of VMEM to the compiler."""
    return next(_candidates(case, chip, vmem_capacity_bytes(chip) * 3 // 4))


def block_space(case: KernelCase, chip: str) -> list[CrossEntropyBlocks]:
    """Blocks that fit, forward and backward sizes varied apart."""
    return list(_candidates(case, chip, vmem_capacity_bytes(chip)))


def _candidates(
    case: KernelCase, chip: str | None, budget_bytes: int
) -> Iterator[CrossEntropyBlocks]:
    x, w = case.arguments[:2]
    width, itemsize = _width_and_itemsize(case)
    tokens = round_up(x.shape[0], tile_shape(jnp.bfloat16, chip)[0])
    vocab = round_up(w.shape[1], LANES)
    sizes = [(t, v) for t in TOKENS for v in VOCAB]
    # Nearly square blocks move the fewest bytes for their area; tokens break the tie.
    sizes.sort(key=lambda size: (-min(size), -size[0]))
    sizes = list(dict.fromkeys((min(t, tokens), min(v, vocab)) for t, v in sizes))
    forward = [size for size in sizes if forward_bytes(width, itemsize, *size) <= budget_bytes]
    backward = [size for size in sizes if backward_bytes(width, itemsize, *size) <= budget_bytes]
    # Where nothing fits, the smallest is offered and the compiler has the last word.
    forward, backward = forward or sizes[-1:], backward or sizes[-1:]
    first = CrossEntropyBlocks(*forward[0], *backward[0])
    yield first
    for size in forward[1:]:
        yield replace(first, tokens=size[0], vocab=size[1])
    for size in backward[1:]:
        yield replace(first, backward_tokens=size[0], backward_vocab=size[1])


def _width_and_itemsize(case: KernelCase) -> tuple[int, int]:
    x, w = case.arguments[:2]
    return x.shape[1], max(jnp.dtype(x.dtype).itemsize, jnp.dtype(w.dtype).itemsize)
