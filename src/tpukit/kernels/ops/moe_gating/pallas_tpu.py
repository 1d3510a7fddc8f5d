"""Choosing experts as a TPU kernel: one pass over the scores, and no sort.

Tokens lie along lanes and experts along sublanes, so that few experts waste nothing. A choice is a
maximum over sublanes. How many earlier tokens chose an expert is a sum along lanes that carries
over from block to block: a product with a triangle of ones inside a block.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....hardware.target import current_target
from ...blocks.tuned import blocks_for
from ...blocks.vmem import vmem_limit_bytes
from ...partition.splits import Assignment
from ...registry.op import KernelCase
from ..gemm.tile import Interpret, tile_dot
from .blocks import GatingBlocks, vmem_bytes
from .reference import Selection

OP_NAME = "moe_gating"


def select_pallas(
    selection: jax.Array,
    *,
    k: int,
    blocks: GatingBlocks | None = None,
    interpret: Interpret = False,
    axes: Assignment | None = None,
) -> Selection:
    """See `select_reference`; where tokens are split, queues go on from device to device."""
    chosen = _select(selection, k=k, blocks=blocks, interpret=interpret)
    over = (axes or {}).get("tokens", ())
    if not over:
        return chosen
    every = jax.lax.all_gather(chosen.counts, over)
    before = jnp.cumsum(every, axis=0) - every
    ahead = before[jax.lax.axis_index(over)]
    return Selection(chosen.experts, chosen.position + ahead[chosen.experts], every.sum(0))


def _select(
    selection: jax.Array, *, k: int, blocks: GatingBlocks | None, interpret: Interpret
) -> Selection:
    tokens, num_experts = selection.shape
    case = KernelCase("traced", (jax.ShapeDtypeStruct(selection.shape, jnp.float32),), {"k": k})
    blocks = blocks_for(OP_NAME, case, blocks)
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
