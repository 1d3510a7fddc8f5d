"""Blocks of the gating kernel: which there are, what they take, which are safe."""

from dataclasses import dataclass

import jax

from ...blocks.tiling import LANES, round_up, word_sublanes
from ...blocks.vmem import vmem_capacity_bytes
from ...registry.op import BlockSizes, KernelCase, shape_bucket

TOKENS = (512, 256, 128, 1024)
MANY_TOKENS = 8192  # more of them are more of the same, whose blocks are as good


@dataclass(frozen=True)
class GatingBlocks(BlockSizes):
    """How many tokens one grid step takes."""

    tokens: int


def bucket(case: KernelCase) -> str:
    """Experts and choices decide, and tokens where there are few."""
    tokens, experts = case.arguments[0].shape
    shape = jax.ShapeDtypeStruct((min(tokens, MANY_TOKENS), experts), case.arguments[0].dtype)
    return shape_bucket(KernelCase(case.name, (shape,), {"k": case.options["k"]}))


def vmem_bytes(case: KernelCase, blocks: GatingBlocks) -> int:
    """Scores, choices and the triangle, with what the arithmetic keeps of them."""
    experts = round_up(case.arguments[0].shape[1], word_sublanes())
    k = round_up(case.options["k"], word_sublanes())
    # Scores twice, and four arrays like them; three results of k rows twice; the triangle twice.
    return blocks.tokens * 4 * (6 * experts + 6 * k) + 2 * blocks.tokens**2 * 4


def default_blocks(case: KernelCase, chip: str | None) -> GatingBlocks:
    """512 tokens, fewer where there are fewer, or where many experts leave no room."""
    most = round_up(case.arguments[0].shape[0], LANES)
    budget = vmem_capacity_bytes(chip) // 2
    space = [GatingBlocks(min(size, most)) for size in sorted(TOKENS[:3], reverse=True)]
    return next((blocks for blocks in space if vmem_bytes(case, blocks) <= budget), space[-1])


def block_space(case: KernelCase, chip: str) -> list[GatingBlocks]:
    """What fits."""
    most = round_up(case.arguments[0].shape[0], LANES)
    found = dict.fromkeys(GatingBlocks(min(size, most)) for size in sorted(TOKENS))
    return [b for b in found if vmem_bytes(case, b) <= vmem_capacity_bytes(chip)]
