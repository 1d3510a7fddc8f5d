"""Models written in equinox; only whoever passes one has to have it installed."""

from dataclasses import dataclass
from typing import Any

import jax

from ...frameworks import is_instance_of
from ..execution import Execution
from ..loss.loss import Batch
from ..remat.policy import RematPolicy
from ..remat.segments import checkpoint_segments
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

        def call(params: Any, *arguments: Any) -> Any:
            return jax.vmap(equinox.combine(params, static))(*arguments)

        run = checkpoint_segments(call, execution.remat)
        outputs = run(variables.params, *self.inputs.arguments(batch))
        return Applied(outputs, variables.model_state)


def _checkpoint(model: Any, remat: RematPolicy) -> Any:
    from ..remat.equinox_module import CheckpointedModule

    return CheckpointedModule(model, remat)


EQUINOX = ModelKind(
    name="equinox",
    accepts="an equinox module",
    recognises=lambda model: is_instance_of(model, "equinox"),
    build=EquinoxAdapter,
    checkpoint=_checkpoint,
)
