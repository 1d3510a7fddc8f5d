"""`moe_gating`: which experts a token goes to, with which weight, and how even that is."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError
from ...partition.splits import Splits
from ...registry.dispatch import dispatch
from ...registry.op import PALLAS_TPU, REFERENCE
from ..gemm.tile import Interpret
from .blocks import GatingBlocks
from .pallas_tpu import OP_NAME, select_pallas
from .reference import Selection, select_reference
from .routing import (
    ExpertGroups,
    Score,
    balance_loss,
    expert_capacity,
    for_selection,
    score_experts,
    weigh_experts,
)

SELECTIONS = {PALLAS_TPU: select_pallas, REFERENCE: select_reference}
# Of the choice: how long a queue is already is told from device to device.
SPLITS = Splits(
    free="tokens",
    arguments=("tokens experts",),
    result=("tokens k", "tokens k", "experts"),
    told_axes=True,
)


class Gating(NamedTuple):
    """Where tokens go. Shapes: T tokens, E experts, k choices.

    `position` is all that moving tokens needs: with a capacity, row `position` of the expert's
    buffer; without one, row `starts[expert] + position` of the rows sorted by expert, where
    `starts` is the exclusive sum of `expert_tokens`.
    """

    experts: jax.Array  # (T, k) int32, best first
    weights: jax.Array  # (T, k) of the experts' outputs; 0 for a choice that found no room
    position: jax.Array  # (T, k) int32: how many earlier tokens chose the same expert
    kept: jax.Array  # (T, k) bool: found room; always without a capacity
    expert_tokens: jax.Array  # (E,) int32: tokens that chose each expert
    balance_loss: jax.Array  # (): 1 when experts are evenly used, up to E
    z_loss: jax.Array  # (): mean squared log of the softmax's normaliser


def moe_gating(
    logits: jax.Array,
    bias: jax.Array | None = None,
    *,
    k: int,
    normalize: bool = True,
    score: Score = "softmax",
    groups: ExpertGroups | None = None,
    weight_scale: float = 1.0,
    expert_scale: jax.Array | None = None,
    capacity_factor: float | None = None,
    implementation: str | None = None,
    blocks: GatingBlocks | None = None,
    interpret: Interpret = False,
) -> Gating:
    """Choose the `k` best experts of every token, in float32.

    Gradients reach the logits through weights and losses; the choice itself has none.

    Args:
        logits: (T, E) of the router.
        bias: (E,) added to the scores for the choice only, never to the weights.
        k: Experts a token.
        normalize: Whether a token's weights are rescaled to sum to one.
        score: "softmax" over experts, or "sigmoid" of each alone.
        groups: Limits the choice to the best groups of experts. XLA finds them before the kernel
            chooses.
        weight_scale: Multiplies all weights, normalized or not.
        expert_scale: (E,) multiplies the weights of each expert, normalized or not.
        capacity_factor: How many times its even share an expert has room for; choices beyond it
            are dropped, later tokens first. None drops nothing.
        implementation: "pallas_tpu" or "reference"; None takes the kernel on TPU.
        blocks: Of the Pallas kernel; None takes the tuned ones.
        interpret: Of the Pallas kernel, where there is no TPU.

    Raises:
        TPUKernelError: The arrays do not belong together.
        TPUValidationError: k, score or capacity make no sense.
    """
    if logits.ndim != 2 or (bias is not None and bias.shape != logits.shape[1:]):
        raise TPUKernelError(
            f"logits are {logits.shape} and bias {None if bias is None else bias.shape}; expected "
            "(tokens, experts) and (experts,)."
        )
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    scores, probabilities = score_experts(wide, k, score)
    selection = for_selection(scores, k, bias=bias, groups=groups)
    chosen: Selection = dispatch(
        OP_NAME,
        SELECTIONS,
        selection,
        implementation=implementation,
        options={"k": k},
        pallas_options={"blocks": blocks, "interpret": interpret},
        names=SPLITS.alone,
    )
    tokens, num_experts = logits.shape
    weights = weigh_experts(
        *(scores, chosen.experts),
        normalize=normalize,
        weight_scale=weight_scale,
        expert_scale=expert_scale,
    )
    kept = jnp.ones_like(chosen.experts, dtype=bool)
    if capacity_factor is not None:
        room = expert_capacity(
            tokens, num_experts=num_experts, k=k, capacity_factor=capacity_factor
        )
        kept = chosen.position < room
        weights = jnp.where(kept, weights, 0)
    log_normaliser = jax.nn.logsumexp(wide, axis=-1)
    return Gating(
        *(chosen.experts, weights, chosen.position, kept, chosen.counts),
        balance_loss=balance_loss(
            chosen.counts.astype(wide.dtype) / (tokens * k), probabilities.mean(0)
        ),
        z_loss=(log_normaliser**2).mean(),
    )
