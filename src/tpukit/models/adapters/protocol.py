"""The protocol between a workload and a model of any framework."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ...annotations import PyTree
from ...errors import TPUModelError
from ...parallel.experts.routing import RouterStats
from ..execution import Execution
from ..loss import Batch


class Variables(NamedTuple):
    """A model's arrays: `params` are trained, `model_state` (batch statistics …) is carried."""

    params: PyTree
    model_state: PyTree

    def copied(self) -> "Variables":
        """Return the same values in new arrays.

        A step donates its state, which without copies would delete the user's own arrays.
        """
        return jax.tree.map(lambda leaf: leaf.copy(), self)


class Applied(NamedTuple):
    """The result of a model: outputs, new state, router statistics, and an extra loss term."""

    outputs: PyTree
    model_state: PyTree
    router: RouterStats | None = None
    penalty: jax.Array | None = None


@dataclass(frozen=True)
class ModelInputs:
    """The names of the batch entries that a model is called with, and the shapes of all entries."""

    names: tuple[str, ...]
    batch_shapes: Mapping[str, jax.ShapeDtypeStruct]

    def arguments(self, batch: Batch) -> list[jax.Array]:
        """Return the entries of `batch` that the model is called with, in order.

        Raises:
            TPUModelError: The batch has no such entry.
        """
        for name in self.names:
            if name not in batch:
                raise TPUModelError(
                    f"the batch has {', '.join(sorted(batch))} but the model reads '{name}'; "
                    "set the model's inputs: Workload(..., inputs=(…,))."
                )
        return [batch[name] for name in self.names]

    def zeros(self) -> list[jax.Array]:
        """Return arguments of zeros, for frameworks that initialise by calling the model."""
        shapes = self.batch_shapes
        return self.arguments({name: jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()})


class ModelAdapter(Protocol):
    """A model behind two pure functions; `register_adapter` adds one for another framework."""

    @property
    def initialised(self) -> bool:
        """Whether `init` returns existing arrays instead of new ones."""
        ...

    def init(self, rng: jax.Array) -> Variables:
        """Return new variables; a pure function that can be traced."""
        ...

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Run the model on a batch."""
        ...


def head_counts_of(adapter: ModelAdapter) -> Mapping[str, int] | None:
    """Return the numbers of "heads" and "kv_heads", or None where the adapter has none.

    Layouts need them for models that merge heads and head size into one dimension.
    """
    return getattr(adapter, "head_counts", None)
