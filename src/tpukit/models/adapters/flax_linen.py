"""Models written in flax linen."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen
from flax.core import meta

from ...frameworks import is_instance_of
from ..execution import Execution
from ..loss.loss import Batch
from ..remat.policy import RematPolicy
from .kind import ModelKind
from .protocol import Applied, ModelInputs, Variables


@dataclass(frozen=True)
class LinenAdapter:
    """A flax linen module; `batch_stats` and the like are carried as `model_state`."""

    model: Any
    inputs: ModelInputs
    initialised: bool = False

    def init(self, rng: jax.Array) -> Variables:
        """New variables, made by calling the module on zeros."""
        rngs = {"params": rng, "dropout": jax.random.fold_in(rng, 1)}
        variables = dict(meta.unbox(self.model.init(rngs, *self.inputs.zeros())))
        return Variables(variables.pop("params", {}), variables)

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Apply the module to the batch entries named by `inputs`."""
        remat = execution.remat
        model = checkpoint_linen(self.model, remat) if remat.active else self.model
        outputs, changed = model.apply(
            {"params": variables.params, **variables.model_state},
            *self.inputs.arguments(batch),
            rngs={"dropout": rng},
            mutable=list(variables.model_state),
        )
        return Applied(outputs, {**variables.model_state, **changed})


def checkpoint_linen(model: linen.Module, remat: RematPolicy) -> linen.Module:
    """The same module as one checkpointed segment; names of parameters stay."""
    policy = remat.for_whole_model(model).jax_policy()
    checkpointed: Any = linen.remat(type(model), policy=policy)
    fields = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)  # pyright: ignore[reportArgumentType]  linen modules are dataclasses
        if field.init and field.name not in ("parent", "name")
    }
    return checkpointed(**fields, name=model.name)


FLAX_LINEN = ModelKind(
    name="flax linen",
    accepts="a flax linen module",
    recognises=lambda model: is_instance_of(model, "flax.linen"),
    build=LinenAdapter,
    checkpoint=checkpoint_linen,
)
