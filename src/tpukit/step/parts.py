"""The state, settings, result and random batches of a training step."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..annotations import AnyMesh, PyTree
from ..models.adapters import ModelAdapter
from ..models.execution import Execution
from ..models.loss import Batch, LossFunction, WeightedLoss, default_loss
from ..parallel.experts.routing import RouterStats


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state between two steps.

    Attributes:
        step: Number of steps taken, an int32 scalar.
        params: The trained parameters.
        opt_state: The optimizer's state, sharded like the parameters.
        model_state: Untrained state that the model carries (batch statistics); often {}.
    """

    step: PyTree
    params: PyTree
    opt_state: PyTree
    model_state: PyTree


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings of a step, fixed when it is traced."""

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
    """The loss and its gradients, the new model state and router statistics."""

    loss: jax.Array
    weight: jax.Array
    gradients: PyTree
    model_state: PyTree
    router: RouterStats | None

    def router_metrics(self) -> dict[str, jax.Array]:
        """Return the router metrics of an MoE model; empty for others."""
        if self.router is None:
            return {}
        return {
            "router_balance_loss": self.router.balance_loss,
            "router_imbalance": self.router.imbalance,
            "router_dropped_fraction": self.router.dropped_fraction,
        }


def weighted_loss(
    loss: LossFunction | None, outputs: PyTree, batch: Batch, *, z_loss: float = 0.0
) -> WeightedLoss:
    """Return the user's loss, or the default loss, as a total and a weight."""
    value = loss(outputs, batch) if loss else default_loss(outputs, batch, z_loss=z_loss)
    if isinstance(value, WeightedLoss):
        return value
    return WeightedLoss(value, jnp.ones((), value.dtype))


def random_batch(
    shapes: Mapping[str, jax.ShapeDtypeStruct], *, below: int, seed: int
) -> dict[str, jax.Array]:
    """Return random integers in [0, below) for integer entries, normal numbers for others."""
    batch: dict[str, jax.Array] = {}
    for index, (name, shape) in enumerate(shapes.items()):
        rng = jax.random.fold_in(jax.random.key(seed), index)
        is_integer = jnp.issubdtype(shape.dtype, jnp.integer)
        batch[name] = (
            jax.random.randint(rng, shape.shape, 0, below, shape.dtype)
            if is_integer
            else jax.random.normal(rng, shape.shape, shape.dtype)
        )
    return batch
