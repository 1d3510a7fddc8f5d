"""The router of an expert layer: what it learns, how it chooses, and the choice."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ...errors import TPUValidationError
from .routing import ExpertGroups, Routing, Score, route


class RouterArrays(NamedTuple):
    """A router's arrays. Experts have the router's numbers, wherever their weights are placed."""

    weight: Array  # (d, E)
    logit_bias: Array | None = None  # (E,) added to the logits
    choice_bias: Array | None = None  # (E,) added to the scores for the choice only
    expert_scale: Array | None = None  # (E,) multiplies the weights of each expert

    def check(self) -> None:
        """Raise TPUValidationError unless all arrays are of the same experts."""
        num_experts = self.weight.shape[-1]
        vectors = {
            "logit_bias": self.logit_bias,
            "router_bias": self.choice_bias,
            "expert_scale": self.expert_scale,
        }
        for name, vector in vectors.items():
            if vector is not None and vector.shape != (num_experts,):
                raise TPUValidationError(
                    f"{name} is {vector.shape} and the router has {num_experts} experts; it must "
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
    """The experts of tokens (T, d), in float32 or better."""
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
