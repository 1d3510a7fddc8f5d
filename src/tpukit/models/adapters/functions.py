"""Models written as a pair of plain functions."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import jax

from ..execution import Execution
from ..loss import Batch
from ..remat.policy import RematPolicy
from ..remat.segments import checkpoint_segments
from .kind import ModelKind
from .protocol import Applied, Variables

Pair = tuple[Callable[[jax.Array], Any], Callable[[Any, Batch], Any]]


@dataclass(frozen=True)
class FunctionAdapter:
    """A pair of plain functions: `init(rng) -> params` and `apply(params, batch) -> outputs`."""

    init_function: Callable[[jax.Array], Any]
    apply_function: Callable[[Any, Batch], Any]
    initialised: bool = False

    def init(self, rng: jax.Array) -> Variables:
        """Return new parameters."""
        return Variables(self.init_function(rng), {})

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Apply the function to the batch."""
        call = checkpoint_segments(self.apply_function, execution.remat)
        return Applied(call(variables.params, batch), variables.model_state)


def _is_pair(model: object) -> bool:
    # Named tuples of functions (haiku's Transformed, an optax optimizer) are not models.
    if type(model) not in (tuple, list):
        return False
    parts = list(cast("Iterable[object]", model))
    return len(parts) == 2 and all(map(callable, parts))


def _checkpoint(model: Pair, remat: RematPolicy) -> Pair:
    init, apply = model
    return init, checkpoint_segments(apply, remat)


FUNCTIONS = ModelKind(
    name="functions",
    accepts="a pair of functions (init, apply)",
    recognises=_is_pair,
    build=lambda model, inputs: FunctionAdapter(*model),
    checkpoint=_checkpoint,
)
