"""Routers: their settings and choice, load statistics that add up, and balancing by a bias."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from rich.table import Table

from ...errors import TPUValidationError
from ...kernels.ops.moe_gating import ExpertGroups as ExpertGroups
from ...kernels.ops.moe_gating import Routing as Routing
from ...kernels.ops.moe_gating import Score as Score
from ...kernels.ops.moe_gating import SortedAssignments as SortedAssignments
from ...kernels.ops.moe_gating import balance_loss
from ...kernels.ops.moe_gating import expert_capacity as expert_capacity
from ...kernels.ops.moe_gating import invert as invert
from ...kernels.ops.moe_gating import route as route
from ...kernels.ops.moe_gating import sort_assignments as sort_assignments
from ...kernels.ops.moe_gating import within_capacity as within_capacity
from ...plain_data import JsonObject
from ...shown import Shown


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class RouterStats(Shown):
    """Sums over routers (layers, steps), which can be added.

    Counts are float32, so a very long sum loses its last digits instead of overflowing.
    """

    routers: Array  # number of routers
    tokens: Array
    expert_tokens: Array  # (E,) pairs sent to each expert, including dropped ones
    dropped_tokens: Array  # (E,) dropped pairs of each expert
    balance_loss_sum: Array
    z_loss_sum: Array
    entropy_sum: Array

    def __add__(self, other: "RouterStats") -> "RouterStats":
        return jax.tree.map(jnp.add, self, other)

    @classmethod
    def zeros(cls, num_experts: int, dtype: DTypeLike = jnp.float32) -> "RouterStats":
        """Return the statistics of no routers, the start of a sum."""
        scalar, vector = jnp.zeros((), dtype), jnp.zeros(num_experts, dtype)
        return cls(scalar, scalar, vector, vector, scalar, scalar, scalar)

    @property
    def load(self) -> Array:
        """(E,) the fraction of all pairs for each expert; 1/E everywhere is even."""
        return self.expert_tokens / jnp.maximum(self.expert_tokens.sum(-1, keepdims=True), 1)

    @property
    def imbalance(self) -> Array:
        """The busiest expert's load over the even share: 1 is perfect, E is one expert for all."""
        return self.load.max(-1) * self.load.shape[-1]

    @property
    def dropped_fraction(self) -> Array:
        """The fraction of pairs that were dropped."""
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

    def to_dict(self) -> JsonObject:
        """Return the figures as plain numbers; only for concrete values, outside jit."""
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
    """Return the statistics of one router.

    Args:
        routing: The result of `route`.
        kept: (T, k) which pairs were not dropped; all of them by default.
        axes: Manual mesh axes that shard the tokens. The figures are of all their tokens, so the
            balance loss is that of the full batch.
    """
    probabilities, logits = routing.probabilities, routing.logits
    num_experts = logits.shape[-1]

    def per_expert(values: Array) -> Array:
        flat = routing.experts.reshape(-1)
        counts = jnp.zeros_like(logits, shape=num_experts).at[flat].add(values.reshape(-1))
        return lax.psum(counts, axes)

    pair = jnp.ones_like(logits, shape=routing.experts.shape)
    # The gradient of the balance loss reads these few numbers. Kept, remat need not sum them again
    # over the network in the backward pass.
    expert_tokens = checkpoint_name(per_expert(pair), "expert_tokens")
    dropped = jnp.zeros_like(expert_tokens) if kept is None else per_expert(pair * ~kept)
    tokens = expert_tokens.sum() / routing.experts.shape[-1]
    mean_probability = lax.psum(probabilities.sum(0), axes) / tokens
    fraction = expert_tokens / expert_tokens.sum()
    log_partition = jax.nn.logsumexp(logits, axis=-1)
    entropy = jax.scipy.special.entr(probabilities).sum()
    return RouterStats(
        routers=jnp.ones((), logits.dtype),
        tokens=tokens,
        expert_tokens=expert_tokens,
        dropped_tokens=dropped,
        balance_loss_sum=balance_loss(fraction, mean_probability),
        z_loss_sum=lax.psum((log_partition**2).sum(), axes) / tokens,
        entropy_sum=lax.psum(entropy, axes) / tokens,
    )


def update_router_bias(bias: Array, load: Array, rate: float = 1e-3) -> Array:
    """Return a router's selection bias moved towards even load, without an auxiliary loss.

    The bias of experts above the mean load falls by `rate`, that of experts below rises by `rate`.
    Call it once per step with `RouterStats.expert_tokens` (or any load) and pass the result to
    `route`.
    """
    return bias + rate * jnp.sign(load.mean(-1, keepdims=True) - load).astype(bias.dtype)


class RouterArrays(NamedTuple):
    """A router's arrays. Experts have the router's numbers, wherever their weights are placed."""

    weight: Array  # (d, E)
    logit_bias: Array | None = None  # (E,) added to the logits
    choice_bias: Array | None = None  # (E,) added to the scores for the choice only
    expert_scale: Array | None = None  # (E,) multiplies the weights of each expert

    def check(self) -> None:
        """Raise TPUValidationError unless all arrays have the same experts."""
        num_experts = self.weight.shape[-1]
        vectors = {
            "logit_bias": self.logit_bias,
            "router_bias": self.choice_bias,
            "expert_scale": self.expert_scale,
        }
        for name, vector in vectors.items():
            if vector is not None and vector.shape != (num_experts,):
                raise TPUValidationError(
                    f"{name} is {vector.shape}, but the router has {num_experts} experts; it must "
                    f"be ({num_experts},)."
                )


@dataclass(frozen=True)
class RouterSettings:
    """How a router chooses; see `route`."""

    k: int
    score: Score
    normalize: bool
    weight_scale: float
    groups: ExpertGroups | None


def choose_experts(tokens: Array, router: RouterArrays, settings: RouterSettings) -> Routing:
    """Choose the experts of tokens (T, d), in float32 or better."""
    precise = jnp.promote_types(tokens.dtype, jnp.float32)
    logits = tokens.astype(precise) @ router.weight.astype(precise)
    if router.logit_bias is not None:
        logits = logits + router.logit_bias.astype(precise)
    return route(
        logits,
        settings.k,
        normalize=settings.normalize,
        score=settings.score,
        bias=router.choice_bias,
        groups=settings.groups,
        weight_scale=settings.weight_scale,
        expert_scale=router.expert_scale,
    )
