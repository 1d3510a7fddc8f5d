"""Choosing experts as a TPU kernel: one pass over the scores, and no sort.

Tokens lie along lanes and experts along sublanes, so that few experts waste nothing. A choice is a
maximum over sublanes. How many earlier tokens chose an expert is a sum along lanes that carries
over from block to block: a product with a triangle of ones inside a block.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....hardware.target import current_target
from ...blocks.tiling import LANES, round_up
from ...blocks.vmem import vmem_capacity_bytes, vmem_limit_bytes
from ...registry.op import BlockSizes, KernelCase, shape_bucket
from ..gemm.tile import Interpret, tile_dot
from .reference import Selection

OP_NAME = "moe_gating"
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
    experts = round_up(case.arguments[0].shape[1], 8)
    k = round_up(case.options["k"], 8)
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


def select_pallas(
    selection: jax.Array, *, k: int, blocks: GatingBlocks, interpret: Interpret = False
) -> Selection:
    """See `select_reference`."""
    tokens, num_experts = selection.shape
    case = KernelCase("traced", (jax.ShapeDtypeStruct(selection.shape, jnp.float32),), {"k": k})
    chosen = pl.BlockSpec((k, blocks.tokens), lambda block: (0, block))
    experts, position, counts = pl.pallas_call(
        partial(_kernel, tokens=tokens),
        grid=(pl.cdiv(tokens, blocks.tokens),),
        in_specs=[pl.BlockSpec((num_experts, blocks.tokens), lambda block: (0, block))],
        out_specs=[chosen, chosen, pl.BlockSpec((num_experts, 1), lambda block: (0, 0))],
        out_shape=[
            jax.ShapeDtypeStruct((k, tokens), jnp.int32),
            jax.ShapeDtypeStruct((k, tokens), jnp.int32),
            jax.ShapeDtypeStruct((num_experts, 1), jnp.int32),
        ],
        scratch_shapes=[pltpu.VMEM((num_experts, 1), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            # Queues carry over from block to block, so blocks are in order.
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=vmem_limit_bytes(vmem_bytes(case, blocks), current_target()),
        ),
        interpret=interpret,
        name=OP_NAME,
    )(selection.T.astype(jnp.float32))
    return Selection(experts.T, position.T, counts[:, 0])


def _kernel(
    scores: Any, experts: Any, position: Any, counts: Any, queued: Any, *, tokens: int
) -> None:
    step, steps = pl.program_id(0), pl.num_programs(0)
    width = scores.shape[1]

    @pl.when(step == 0)
    def _start() -> None:
        queued[...] = jnp.zeros(queued.shape, queued.dtype)

    shape = scores.shape
    expert = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    exists = step * width + jax.lax.broadcasted_iota(jnp.int32, shape, 1) < tokens
    left = jnp.where(exists, scores[...], 0.0)
    free = jnp.ones(shape, jnp.bool_)
    choices: list[jax.Array] = []
    for choice in range(experts.shape[0]):
        best = jnp.max(left, axis=0, keepdims=True)
        # Of equals the lowest number, as top-k has it.
        equals = jnp.where(free & (left == best), expert, shape[0])
        number = jnp.min(equals, axis=0, keepdims=True)
        experts[choice : choice + 1, :] = number
        choices.append(expert == number)
        left = jnp.where(choices[-1], -jnp.inf, left)
        free = free & ~choices[-1]
    anyone = jnp.zeros(shape, jnp.float32)
    for taken in choices:
        anyone = anyone + jnp.where(taken & exists, 1.0, 0.0)
    # Ones and zeros are exact in bfloat16, and their sums in float32.
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (width, width), axis) for axis in (0, 1))
    earlier = jnp.where(row < column, 1.0, 0.0).astype(jnp.bfloat16)
    before = queued[...] + tile_dot(anyone.astype(jnp.bfloat16), earlier)
    for choice, taken in enumerate(choices):
        place = jnp.sum(jnp.where(taken, before, 0.0), axis=0, keepdims=True)
        position[choice : choice + 1, :] = place.astype(jnp.int32)
    queued[...] += jnp.sum(anyone, axis=1, keepdims=True)

    @pl.when(step == steps - 1)
    def _finish() -> None:
        counts[...] = queued[...].astype(jnp.int32)
