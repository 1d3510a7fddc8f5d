"""What the ways of computing a step have in common: settings, result, cutting, weighing."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..annotations import AnyMesh
from ..models.adapters import ModelAdapter
from ..models.execution import Execution
from ..models.loss.loss import Batch, LossFunction, WeightedLoss, default_loss
from ..parallel.experts.routing import RouterStats


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What a step needs to know besides its arguments."""

    adapter: ModelAdapter
    loss: LossFunction | None
    execution: Execution
    microbatches: int
    pipeline_schedule: str
    strategy: str
    grad_norm: bool
    mesh: AnyMesh | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The mean loss, its gradients, and what the step learned on the way."""

    loss: jax.Array
    weight: jax.Array
    gradients: Any
    model_state: Any
    router: RouterStats | None

    def router_metrics(self) -> dict[str, jax.Array]:
        """Figures of the routers, for an MoE."""
        if self.router is None:
            return {}
        return {
            "router_balance_loss": self.router.balance_loss,
            "router_imbalance": self.router.imbalance,
            "router_dropped_fraction": self.router.dropped_fraction,
        }


def weighted_loss(
    loss: LossFunction | None, outputs: Any, batch: Batch, *, z_loss: float = 0.0
) -> WeightedLoss:
    """The user's loss, or the default one, as a total and a weight."""
    value = loss(outputs, batch) if loss else default_loss(outputs, batch, z_loss=z_loss)
    if isinstance(value, WeightedLoss):
        return value
    return WeightedLoss(value, jnp.ones((), value.dtype))
