"""Choosing experts for tokens in plain jnp: scores, top-k, queues of experts, and capacity."""

import math
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....errors import TPUValidationError, did_you_mean

Score: TypeAlias = Literal["softmax", "sigmoid"]


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
) -> Routing:
    """Choose the `k` best experts of every token.

    Args:
        logits: (T, E) router outputs, best in float32.
        k: Experts a token.
        normalize: Whether a token's `k` weights are rescaled to sum to one.
        score: How logits become scores: "softmax" over experts, or "sigmoid" of each expert alone.
        bias: (E,) added to the scores for the choice only, never to the weights
            (`update_router_bias` keeps such a bias so that experts stay evenly used).
    """
    scores, probabilities = score_experts(logits, k, score)
    _, experts = lax.top_k(for_selection(scores, bias), k)
    weights = weigh_experts(scores, experts, normalize=normalize)
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
        return scores, scores / scores.sum(-1, keepdims=True)
    raise TPUValidationError(
        f"Router score '{score}' is unknown; known are {', '.join(get_args(Score))}."
        f"{did_you_mean(score, get_args(Score))}"
    )


def for_selection(scores: Array, bias: Array | None) -> Array:
    """What the choice looks at; not differentiated: gradients come through the weights."""
    return lax.stop_gradient(scores if bias is None else scores + bias)


def weigh_experts(scores: Array, experts: Array, *, normalize: bool) -> Array:
    """(T, k) weights of the chosen experts."""
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    return weights / weights.sum(-1, keepdims=True) if normalize else weights


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
