"""Choosing experts for tokens: top-k, capacity, load statistics and bias-based balancing."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from rich.table import Table

from ..errors import TPUValidationError, did_you_mean

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
    num_experts = logits.shape[-1]
    if not 1 <= k <= num_experts:
        raise TPUValidationError(
            f"k={k} experts a token were asked for and there are {num_experts}: "
            f"k must be between 1 and {num_experts}."
        )
    if score == "softmax":
        scores = probabilities = jax.nn.softmax(logits, axis=-1)
    elif score == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        probabilities = scores / scores.sum(-1, keepdims=True)
    else:
        raise TPUValidationError(
            f"Router score '{score}' is unknown; known are {', '.join(get_args(Score))}."
            f"{did_you_mean(score, get_args(Score))}"
        )
    # Selection is not differentiated: gradients reach the router through the weights.
    selection = lax.stop_gradient(scores if bias is None else scores + bias)
    _, experts = lax.top_k(selection, k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routing(experts, weights, probabilities, logits)


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


def within_capacity(experts: Array, assignments: SortedAssignments, capacity: int) -> Array:
    """(T, k) booleans: is the pair among the first `capacity` tokens that chose its expert?"""
    position = assignments.place.reshape(experts.shape) - assignments.starts[experts]
    return position < capacity


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class RouterStats:
    """Sums over routers (layers, steps): add two and the means below stay right.

    Counts are float32, so a very long sum loses its last digits instead of overflowing.
    """

    routers: Array  # how many routers were summed
    tokens: Array
    expert_tokens: Array  # (E,) pairs sent to each expert, dropped ones included
    dropped_tokens: Array  # (E,) pairs an expert had no room for
    balance_loss_sum: Array
    z_loss_sum: Array
    entropy_sum: Array

    def __add__(self, other: "RouterStats") -> "RouterStats":
        return jax.tree.map(jnp.add, self, other)

    @classmethod
    def zeros(cls, num_experts: int) -> "RouterStats":
        """The statistics of no routers: where a sum starts."""
        scalar, vector = jnp.zeros((), jnp.float32), jnp.zeros(num_experts, jnp.float32)
        return cls(scalar, scalar, vector, vector, scalar, scalar, scalar)

    @property
    def load(self) -> Array:
        """(E,) the fraction of all pairs that each expert was sent; 1/E everywhere is even."""
        return self.expert_tokens / jnp.maximum(self.expert_tokens.sum(-1, keepdims=True), 1)

    @property
    def imbalance(self) -> Array:
        """The busiest expert's load over the even share: 1 is perfect, E is one expert for all."""
        return self.load.max(-1) * self.load.shape[-1]

    @property
    def dropped_fraction(self) -> Array:
        """The fraction of pairs that found no room."""
        return self.dropped_tokens.sum(-1) / jnp.maximum(self.expert_tokens.sum(-1), 1)

    @property
    def balance_loss(self) -> Array:
        """Mean balance loss of a router (Switch Transformer): 1 when even, up to E."""
        return self.balance_loss_sum / jnp.maximum(self.routers, 1)

    @property
    def z_loss(self) -> Array:
        """Mean squared log-partition of a router: large when logits drift."""
        return self.z_loss_sum / jnp.maximum(self.routers, 1)

    @property
    def entropy(self) -> Array:
        """Mean entropy in nats of the router's distribution: log E is undecided, 0 is certain."""
        return self.entropy_sum / jnp.maximum(self.routers, 1)

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain numbers; only for concrete values, outside jit."""
        return {
            "routers": float(self.routers),
            "tokens": float(self.tokens),
            "expert_tokens": [float(count) for count in self.expert_tokens],
            "imbalance": float(self.imbalance),
            "dropped_fraction": float(self.dropped_fraction),
            "balance_loss": float(self.balance_loss),
            "z_loss": float(self.z_loss),
            "entropy": float(self.entropy),
        }

    def __rich__(self) -> Table:
        figures = self.to_dict()
        table = Table(
            title=f"{figures['tokens']:.0f} tokens · busiest expert {figures['imbalance']:.2f}× "
            f"the even share · {figures['dropped_fraction']:.1%} dropped (measured)"
        )
        table.add_column("expert", justify="right")
        table.add_column("pairs", justify="right")
        table.add_column("load")
        most = max(*figures["expert_tokens"], 1.0)
        for expert, count in enumerate(figures["expert_tokens"]):
            table.add_row(str(expert), f"{count:.0f}", "█" * round(24 * count / most))
        return table


def router_stats(
    routing: Routing, *, kept: Array | None = None, axes: tuple[str, ...] = ()
) -> RouterStats:
    """Statistics of one router.

    Args:
        routing: What `route` returned.
        kept: (T, k) which pairs found room; all of them by default.
        axes: Manual mesh axes the tokens are split over: the figures are of all their tokens, so
            the balance loss is that of the whole batch and not of one shard.
    """
    probabilities, logits = routing.probabilities, routing.logits
    num_experts = logits.shape[-1]

    def per_expert(values: Array) -> Array:
        flat = routing.experts.reshape(-1)
        counts = jnp.zeros_like(logits, shape=num_experts).at[flat].add(values.reshape(-1))
        return lax.psum(counts, axes)

    pair = jnp.ones_like(logits, shape=routing.experts.shape)
    expert_tokens = per_expert(pair)
    dropped = jnp.zeros_like(expert_tokens) if kept is None else per_expert(pair * ~kept)
    tokens = expert_tokens.sum() / routing.experts.shape[-1]
    mean_probability = lax.psum(probabilities.sum(0), axes) / tokens
    fraction = lax.stop_gradient(expert_tokens / expert_tokens.sum())
    log_partition = jax.nn.logsumexp(logits, axis=-1)
    entropy = jax.scipy.special.entr(probabilities).sum()
    return RouterStats(
        routers=jnp.ones((), logits.dtype),
        tokens=tokens,
        expert_tokens=expert_tokens,
        dropped_tokens=dropped,
        balance_loss_sum=num_experts * (fraction * mean_probability).sum(),
        z_loss_sum=lax.psum((log_partition**2).sum(), axes) / tokens,
        entropy_sum=lax.psum(entropy, axes) / tokens,
    )


def update_router_bias(bias: Array, load: Array, rate: float = 1e-3) -> Array:
    """Move a router's selection bias towards even load, with no auxiliary loss.

    Experts above the mean load become `rate` less attractive, those below `rate` more. Call it
    once a step with `RouterStats.expert_tokens` (or any load) and pass the result to `route`.
    """
    return bias + rate * jnp.sign(load.mean(-1, keepdims=True) - load).astype(bias.dtype)
