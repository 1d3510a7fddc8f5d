"""What a workload needs from a model, whatever framework it is written in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ...annotations import PyTree
from ...errors import TPUModelError
from ...parallel.experts.routing import RouterStats
from ..execution import Execution
from ..loss.loss import Batch


class Variables(NamedTuple):
    """What a model owns: `params` are trained, `model_state` (batch statistics …) is carried."""

    params: PyTree
    model_state: PyTree

    def copied(self) -> "Variables":
        """The same values in new arrays.

        A step donates its state; without copies it would delete the arrays of the user's model.
        """
        return jax.tree.map(lambda leaf: leaf.copy(), self)


class Applied(NamedTuple):
    """What a model gave: outputs, its new state, and what its routers did and cost (MoE)."""

    outputs: PyTree
    model_state: PyTree
    router: RouterStats | None = None
    penalty: jax.Array | None = None


@dataclass(frozen=True)
class ModelInputs:
    """What a model is called with: entries of a batch by name, and the shapes of all entries."""

    names: tuple[str, ...]
    batch_shapes: Mapping[str, jax.ShapeDtypeStruct]

    def arguments(self, batch: Batch) -> list[jax.Array]:
        """The entries of `batch` that the model is called with, in order.

        Raises:
            TPUModelError: The batch lacks one.
        """
        for name in self.names:
            if name not in batch:
                raise TPUModelError(
                    f"the batch has {', '.join(sorted(batch))} but the model reads '{name}'; "
                    "name the entries it is called with: Workload(..., inputs=(…,))."
                )
        return [batch[name] for name in self.names]

    def zeros(self) -> list[jax.Array]:
        """Arguments of the right shapes, for frameworks that initialise by calling the model."""
        shapes = self.batch_shapes
        return self.arguments({name: jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()})


class ModelAdapter(Protocol):
    """A model behind two pure functions; `register_adapter` adds one for another framework."""

    @property
    def initialised(self) -> bool:
        """True when `init` returns arrays that exist already instead of making new ones."""
        ...

    def init(self, rng: jax.Array) -> Variables:
        """New variables; a pure function that can be traced."""
        ...

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Run the model on a batch."""
        ...


def head_counts_of(adapter: ModelAdapter) -> Mapping[str, int] | None:
    """Return how many "heads" and "kv_heads" a model has, where its adapter has `head_counts`.

    Layouts need it for models that merge heads and head size into one dimension.
    """
    return getattr(adapter, "head_counts", None)
