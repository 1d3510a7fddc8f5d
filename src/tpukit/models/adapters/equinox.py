"""Models written in equinox; only whoever passes one has to have it installed."""

from dataclasses import dataclass
from typing import Any

import jax

from ...frameworks import is_instance_of
from ..execution import Execution
from ..loss.loss import Batch
from ..remat.policy import RematPolicy
from .kind import ModelKind
from .protocol import Applied, ModelInputs, Variables


@dataclass(frozen=True)
class EquinoxAdapter:
    """An equinox module, called on one example at a time (equinox's convention) under vmap."""

    model: Any
    inputs: ModelInputs
    initialised: bool = True

    def init(self, rng: jax.Array) -> Variables:
        """The module's own arrays."""
        import equinox

        return Variables(equinox.filter(self.model, equinox.is_inexact_array), {}).copied()

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Call the module on every example."""
        import equinox

        static = equinox.filter(self.model, equinox.is_inexact_array, inverse=True)
        model = equinox.combine(variables.params, static)
        call = execution.remat.for_whole_model(model).wrap(jax.vmap(model))
        return Applied(call(*self.inputs.arguments(batch)), variables.model_state)


def _checkpoint(model: Any, remat: RematPolicy) -> Any:
    import equinox

    policy = remat.for_whole_model(model).jax_policy()
    return equinox.filter_checkpoint(model, policy=policy)


EQUINOX = ModelKind(
    name="equinox",
    accepts="an equinox module",
    recognises=lambda model: is_instance_of(model, "equinox"),
    build=EquinoxAdapter,
    checkpoint=_checkpoint,
)
