"""The loss of a batch without training on it: the same model, placed the same way."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..annotations import AnyMesh
from ..models.adapters import Variables
from ..models.loss.loss import Batch, WeightedLoss
from .parts import weighted_loss
from .token_order import in_ring_order
from .workload import Workload


def jit_eval_step(work: Workload, mesh: AnyMesh) -> Any:
    """(params, model_state, batch) -> the sum of losses and its weight, compiled for `mesh`.

    No z-loss and no router penalty: those are for training. Layers that a pipeline spreads over
    stages are used one after the other, each gathered when its turn comes.
    """
    shardings, layout = work.shardings(mesh), work.layout(mesh)
    execution = work.execution_on(mesh).replace(z_loss=0.0)

    def loss(params: Any, model_state: Any, batch: Batch) -> WeightedLoss:
        with layout.activation_rules():
            batch = in_ring_order(batch, execution.zigzag)
            applied = work.adapter.apply(
                Variables(params, model_state),
                batch,
                rng=jax.random.key(work.seed),
                execution=execution,
            )
            return weighted_loss(work.loss, applied.outputs, batch)

    return jax.jit(
        loss,
        in_shardings=(shardings.state.params, shardings.state.model_state, shardings.batch),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
