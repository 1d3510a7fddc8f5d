"""Choosing experts for tokens in plain jnp: scores, top-k, queues of experts, and capacity."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....errors import TPUValidationError, did_you_mean

Score: TypeAlias = Literal["softmax", "sigmoid"]
# Sigmoids can all be so small that their sum rounds to nothing. As DeepSeek V3 has it; too small
# to change a sum that is something.
_TINY = 1e-20


@dataclass(frozen=True)
class ExpertGroups:
    """A choice limited to the best groups of consecutive experts (DeepSeek V2 and V3).

    Attributes:
        count: Groups of equal size, such as the devices or hosts that hold the experts.
        kept: How many groups a token may choose experts from.
        top: A group is worth the sum of its so many best scores.
    """

    count: int
    kept: int
    top: int = 2

    def check(self, num_experts: int, k: int) -> None:
        """Raise TPUValidationError where no choice of `k` experts can be made this way."""
        if self.count < 1 or num_experts % self.count:
            raise TPUValidationError(
                f"{num_experts} experts cannot be split into {self.count} equal groups; use a "
                "number of groups that divides them."
            )
        size = num_experts // self.count
        if not 1 <= self.top <= size:
            raise TPUValidationError(
                f"A group is to be worth its {self.top} best scores and has {size} experts; use "
                f"between 1 and {size}."
            )
        if not 1 <= self.kept <= self.count or self.kept * size < k:
            raise TPUValidationError(
                f"{self.kept} of {self.count} groups of {size} experts are kept, to choose {k} "
                f"experts from; keep between {-(-k // size)} and {self.count} groups."
            )


class Routing(NamedTuple):
    """Which experts each token goes to. Shapes: T tokens, E experts, k choices."""

    experts: Array  # (T, k) int32, best first
    weights: Array  # (T, k) how much of each expert's output the token takes
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
        k: Experts a token.
        normalize: Whether a token's `k` weights are rescaled to sum to one.
        score: How logits become scores: "softmax" over experts, or "sigmoid" of each expert alone.
        bias: (E,) added to the scores for the choice only, never to the weights
            (`update_router_bias` keeps such a bias so that experts stay evenly used).
        groups: Limits the choice to the best groups of experts.
        weight_scale: Multiplies all weights, normalized or not.
        expert_scale: (E,) multiplies the weights of each expert, normalized or not.
    """
    scores, probabilities = score_experts(logits, k, score)
    _, experts = lax.top_k(for_selection(scores, k, bias=bias, groups=groups), k)
    weights = weigh_experts(
        scores, experts, normalize=normalize, weight_scale=weight_scale, expert_scale=expert_scale
    )
    return Routing(experts, weights, probabilities, logits)


def score_experts(logits: Array, k: int, score: Score) -> tuple[Array, Array]:
    """(T, E) scores, and the distribution over experts they make.

    Raises:
        TPUValidationError: There are fewer than k experts, or no such score.
    """
    num_experts = logits.shape[-1]
    if not 1 <= k <= num_experts:
        raise TPUValidationError(
            f"k={k} experts a token were asked for and there are {num_experts}: "
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


def for_selection(
    scores: Array, k: int, *, bias: Array | None, groups: ExpertGroups | None
) -> Array:
    """(T, E) what the choice of `k` goes by: experts out of the question are at minus infinity.

    Not differentiated: gradients come through the weights.

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
    stands = (kept[..., None] == jnp.arange(groups.count)).any(-2)
    return jnp.where(stands[..., None], grouped, -jnp.inf).reshape(selection.shape)


def weigh_experts(
    scores: Array,
    experts: Array,
    *,
    normalize: bool,
    weight_scale: float = 1.0,
    expert_scale: Array | None = None,
) -> Array:
    """(T, k) weights of the chosen experts."""
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

    order: Array  # (T*k,) which pair stands at each sorted place
    place: Array  # (T*k,) where each pair landed: the inverse of `order`
    counts: Array  # (E,) pairs of each expert
    starts: Array  # (E,) where each expert's group begins


def sort_assignments(experts: Array, num_experts: int) -> SortedAssignments:
    """Group the (T, k) chosen experts by expert; earlier tokens come first in every group."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    place = invert(order)
    counts = jnp.zeros_like(flat, shape=num_experts).at[flat].add(1)
    return SortedAssignments(order, place, counts, jnp.cumsum(counts) - counts)


def invert(order: Array) -> Array:
    """The inverse of a permutation, without a second sort."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)


def expert_capacity(tokens: int, *, num_experts: int, k: int, capacity_factor: float) -> int:
    """Rows each expert keeps for a group of `tokens`: the even share times `capacity_factor`.

    Never more than `tokens`, because a token chooses an expert at most once.
    """
    if capacity_factor <= 0:
        raise TPUValidationError(
            f"capacity_factor={capacity_factor} leaves experts no room; use 1.0 for an exactly "
            "even share, or 1.25 to 2.0 for head-room."
        )
    return min(tokens, max(1, math.ceil(tokens * k * capacity_factor / num_experts)))


def queue_positions(experts: Array, assignments: SortedAssignments) -> Array:
    """(T, k): how many earlier tokens chose the same expert."""
    return assignments.place.reshape(experts.shape) - assignments.starts[experts]


def within_capacity(experts: Array, assignments: SortedAssignments, capacity: int) -> Array:
    """(T, k) booleans: is the pair among the first `capacity` tokens that chose its expert?"""
    return queue_positions(experts, assignments) < capacity


def balance_loss(fraction: Array, mean_probability: Array) -> Array:
    """Load-balance loss of the Switch Transformer: 1 when experts are evenly used, up to E.

    Args:
        fraction: (E,) of all pairs, the part each expert was sent; a constant to the gradient.
        mean_probability: (E,) the router's distribution, averaged over tokens.
    """
    return fraction.shape[-1] * (lax.stop_gradient(fraction) * mean_probability).sum()
