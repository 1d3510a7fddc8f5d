"""Top-k gating of a mixture of experts: scores, choices, expert queues, capacity and losses."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...errors import TPUKernelError, TPUValidationError, did_you_mean

Score: TypeAlias = Literal["softmax", "sigmoid"]
# Added to the sum of sigmoids, which can round to zero. DeepSeek V3's value: too small to change
# any other sum.
_TINY = 1e-20


@dataclass(frozen=True)
class ExpertGroups:
    """Limit a choice to the best groups of consecutive experts (DeepSeek V2 and V3).

    Attributes:
        count: Number of equal groups, such as the devices or hosts that store the experts.
        kept: How many groups a token may choose experts from.
        top: A group's score is the sum of its `top` best expert scores.
    """

    count: int
    kept: int
    top: int = 2

    def check(self, num_experts: int, k: int) -> None:
        """Raise TPUValidationError if `k` experts cannot be chosen from these groups."""
        if self.count < 1 or num_experts % self.count:
            raise TPUValidationError(
                f"{num_experts} experts cannot be split into {self.count} equal groups; use a "
                "number of groups that divides them."
            )
        size = num_experts // self.count
        if not 1 <= self.top <= size:
            raise TPUValidationError(
                f"top={self.top} best scores of a group are to be added up, but a group has {size} "
                f"experts; use between 1 and {size}."
            )
        if not 1 <= self.kept <= self.count or self.kept * size < k:
            raise TPUValidationError(
                f"{self.kept} of {self.count} groups of {size} experts are kept, but {k} experts "
                f"are chosen from them; keep between {-(-k // size)} and {self.count} groups."
            )


class Routing(NamedTuple):
    """Which experts each token goes to. Shapes: T tokens, E experts, k choices."""

    experts: Array  # (T, k) int32, best first
    weights: Array  # (T, k) the weight of each expert's output
    probabilities: Array  # (T, E) the router's distribution, before any bias
    logits: Array  # (T, E)


def route(
    logits: Array,
    k: int,
    *,
    normalize: bool = True,
    score: Score = "softmax",
    bias: Array | None = None,
    groups: ExpertGroups | None = None,
    weight_scale: float = 1.0,
    expert_scale: Array | None = None,
) -> Routing:
    """Choose the `k` best experts of every token.

    Args:
        logits: (T, E) router outputs, best in float32.
        k: Experts per token.
        normalize: Whether a token's `k` weights are rescaled to sum to one.
        score: How logits become scores: "softmax" over experts, or "sigmoid" of each expert alone.
        bias: (E,) added to the scores for the choice only, never to the weights
            (`update_router_bias` keeps such a bias so that experts stay evenly used).
        groups: Limits the choice to the best groups of experts.
        weight_scale: Multiplies all weights, normalized or not.
        expert_scale: (E,) multiplies the weights of each expert, normalized or not.
    """
    scores, probabilities = _score(logits, k, score)
    _, experts = lax.top_k(_selection_scores(scores, k, bias=bias, groups=groups), k)
    weights = _weigh(
        scores, experts, normalize=normalize, weight_scale=weight_scale, expert_scale=expert_scale
    )
    return Routing(experts, weights, probabilities, logits)


def _score(logits: Array, k: int, score: Score) -> tuple[Array, Array]:
    """Return (T, E) scores, and the same normalised to a distribution over experts.

    Raises:
        TPUValidationError: There are fewer than k experts, or no such score.
    """
    num_experts = logits.shape[-1]
    if not 1 <= k <= num_experts:
        raise TPUValidationError(
            f"k={k} experts per token, but there are {num_experts} experts; "
            f"k must be between 1 and {num_experts}."
        )
    if score == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
        return scores, scores
    if score == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        return scores, _to_sum_one(scores)
    raise TPUValidationError(
        f"Router score '{score}' is unknown; known are {', '.join(get_args(Score))}."
        f"{did_you_mean(score, get_args(Score))}"
    )


def _selection_scores(
    scores: Array, k: int, *, bias: Array | None, groups: ExpertGroups | None
) -> Array:
    """Return the (T, E) scores that the choice of `k` sorts by.

    Experts of excluded groups are at minus infinity. The scores have no gradient, because gradients
    reach the router through the weights.

    Raises:
        TPUValidationError: The groups do not fit the experts.
    """
    selection = lax.stop_gradient(scores if bias is None else scores + bias)
    return selection if groups is None else _in_best_groups(selection, k, groups)


def _in_best_groups(selection: Array, k: int, groups: ExpertGroups) -> Array:
    groups.check(selection.shape[-1], k)
    grouped = selection.reshape(*selection.shape[:-1], groups.count, -1)
    best, _ = lax.top_k(grouped, groups.top)
    _, kept = lax.top_k(best.sum(-1), groups.kept)
    is_kept = (kept[..., None] == jnp.arange(groups.count)).any(-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(selection.shape)


def _weigh(
    scores: Array,
    experts: Array,
    *,
    normalize: bool,
    weight_scale: float = 1.0,
    expert_scale: Array | None = None,
) -> Array:
    """Return the (T, k) weights of the chosen experts."""
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalize:
        weights = _to_sum_one(weights)
    if expert_scale is not None:
        weights = weights * expert_scale[experts]
    return weights * weight_scale


def _to_sum_one(scores: Array) -> Array:
    return scores / (scores.sum(-1, keepdims=True) + _TINY)


class SortedAssignments(NamedTuple):
    """The T×k (token, choice) pairs grouped by expert, tokens in order inside each group."""

    order: Array  # (T*k,) which pair is at each sorted place
    place: Array  # (T*k,) sorted place of each pair: the inverse of `order`
    counts: Array  # (E,) pairs per expert
    starts: Array  # (E,) where each expert's group begins


def sort_assignments(experts: Array, num_experts: int) -> SortedAssignments:
    """Group the (T, k) chosen experts by expert; earlier tokens come first in every group."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    place = invert(order)
    counts = jnp.zeros_like(flat, shape=num_experts).at[flat].add(1)
    return SortedAssignments(order, place, counts, jnp.cumsum(counts) - counts)


def invert(order: Array) -> Array:
    """Invert a permutation without a second sort."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)


def expert_capacity(tokens: int, *, num_experts: int, k: int, capacity_factor: float) -> int:
    """Return the rows per expert for a group of `tokens`: the even share times `capacity_factor`.

    The result is at most `tokens`, because a token chooses an expert at most once.
    """
    if capacity_factor <= 0:
        raise TPUValidationError(
            f"capacity_factor={capacity_factor} must be positive; use 1.0 for an exactly even "
            "share, or 1.25 to 2.0 for head-room."
        )
    return min(tokens, max(1, math.ceil(tokens * k * capacity_factor / num_experts)))


def queue_positions(experts: Array, assignments: SortedAssignments) -> Array:
    """Count, for each (T, k) choice, the earlier tokens that chose the same expert."""
    return assignments.place.reshape(experts.shape) - assignments.starts[experts]


def within_capacity(experts: Array, assignments: SortedAssignments, capacity: int) -> Array:
    """Return (T, k) booleans: whether a choice is among the first `capacity` of its expert."""
    return queue_positions(experts, assignments) < capacity


def balance_loss(fraction: Array, mean_probability: Array) -> Array:
    """Return the Switch Transformer's load-balance loss: 1 for evenly used experts, at most E.

    Args:
        fraction: (E,) share of all pairs that each expert gets; it has no gradient.
        mean_probability: (E,) the router's distribution, averaged over tokens.
    """
    return fraction.shape[-1] * (lax.stop_gradient(fraction) * mean_probability).sum()


class Gating(NamedTuple):
    """Where tokens go. Shapes: T tokens, E experts, k choices.

    `position` is the row of a choice in its expert's buffer where there is a capacity. Without a
    capacity a choice is row `starts[expert] + position` of the rows sorted by expert, where
    `starts` is the exclusive sum of `expert_tokens`.
    """

    experts: Array  # (T, k) int32, best first
    weights: Array  # (T, k) of the experts' outputs; 0 for a choice that was dropped
    position: Array  # (T, k) int32: how many earlier tokens chose the same expert
    kept: Array  # (T, k) bool: within the capacity; always true without one
    expert_tokens: Array  # (E,) int32: tokens that chose each expert
    balance_loss: Array  # (): 1 when experts are evenly used, up to E
    z_loss: Array  # (): mean squared log of the softmax's normaliser


def moe_gating(
    logits: Array,
    bias: Array | None = None,
    *,
    k: int,
    normalize: bool = True,
    score: Score = "softmax",
    groups: ExpertGroups | None = None,
    weight_scale: float = 1.0,
    expert_scale: Array | None = None,
    capacity_factor: float | None = None,
) -> Gating:
    """Choose the `k` best experts of every token, computed in float32.

    Gradients reach the logits through weights and losses; the choice itself has none.

    Args:
        logits: (T, E) of the router.
        bias: (E,) added to the scores for the choice only, never to the weights.
        k: Experts per token.
        normalize: Whether a token's weights are rescaled to sum to one.
        score: "softmax" over experts, or "sigmoid" of each expert alone.
        groups: Limits the choice to the best groups of experts.
        weight_scale: Multiplies all weights, normalized or not.
        expert_scale: (E,) multiplies the weights of each expert, normalized or not.
        capacity_factor: Capacity of an expert as a multiple of its even share. Choices beyond the
            capacity are dropped, later tokens first. None drops nothing.

    Raises:
        TPUKernelError: logits or bias have the wrong shape.
        TPUValidationError: k, score, groups or capacity_factor are out of range.
    """
    if logits.ndim != 2 or (bias is not None and bias.shape != logits.shape[1:]):
        raise TPUKernelError(
            f"logits are {logits.shape} and bias {None if bias is None else bias.shape}; expected "
            "(tokens, experts) and (experts,)."
        )
    with jax.named_scope("moe_gating"):
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        experts, weights, probabilities, _ = route(
            wide,
            k,
            normalize=normalize,
            score=score,
            bias=bias,
            groups=groups,
            weight_scale=weight_scale,
            expert_scale=expert_scale,
        )
        tokens, num_experts = logits.shape
        assignments = sort_assignments(experts, num_experts)
        position = queue_positions(experts, assignments)
        kept = jnp.ones_like(experts, dtype=bool)
        if capacity_factor is not None:
            capacity = expert_capacity(
                tokens, num_experts=num_experts, k=k, capacity_factor=capacity_factor
            )
            kept = position < capacity
            weights = jnp.where(kept, weights, 0)
        fraction = assignments.counts.astype(wide.dtype) / (tokens * k)
        return Gating(
            experts=experts.astype(jnp.int32),
            weights=weights,
            position=position.astype(jnp.int32),
            kept=kept,
            expert_tokens=assignments.counts.astype(jnp.int32),
            balance_loss=balance_loss(fraction, probabilities.mean(0)),
            z_loss=(jax.nn.logsumexp(wide, axis=-1) ** 2).mean(),
        )
