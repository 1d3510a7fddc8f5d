"""The step as a pure function, built in one place: what is compiled offline is what runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...annotations import AnyMesh, PyTree
from .placement import by_example, divided, shape_on

LossFunction = Callable[[PyTree, PyTree], jax.Array]
"""(parameters, batch) -> the mean loss of the batch."""


class Stepped(NamedTuple):
    """What a step gives.

    Attributes:
        loss: NaN where gradients were given and nobody knows the loss.
    """

    params: PyTree
    opt_state: PyTree
    loss: jax.Array
    gradient_norm: jax.Array


@dataclass(frozen=True)
class OptimizerProgram:
    """A step with an optimizer.

    Attributes:
        loss: Where gradients are computed in the step; None: they are given.
        checkpointing: Whether the backward pass computes activations again, to save memory.
    """

    optimizer: optax.GradientTransformation
    loss: LossFunction | None = None
    checkpointing: bool = False

    def __call__(self, params: PyTree, opt_state: PyTree, given: PyTree) -> Stepped:
        """Take a step; `given` is a batch, or gradients where there is no loss."""
        loss, gradients = self._gradients(params, given)
        updates, opt_state = self.optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return Stepped(params, opt_state, loss, optax.tree.norm(gradients))

    @property
    def __name__(self) -> str:
        """What the compiler calls it."""
        return "optimizer_step"

    def arguments(self, params: PyTree, given: PyTree, mesh: AnyMesh) -> tuple[Any, Any, Any]:
        """Return the shapes of its arguments with where they lie on a mesh."""
        placed = jax.tree.map(lambda leaf: shape_on(leaf, divided(jnp.shape(leaf), mesh)), params)
        state = jax.tree.map(
            lambda leaf: shape_on(leaf, divided(leaf.shape, mesh)),
            jax.eval_shape(self.optimizer.init, placed),
        )
        if self.loss is None:
            given = jax.tree.map(lambda leaf: shape_on(leaf, divided(jnp.shape(leaf), mesh)), given)
        else:
            given = jax.tree.map(
                lambda leaf: shape_on(leaf, by_example(jnp.shape(leaf), mesh)), given
            )
        return placed, state, given

    def _gradients(self, params: PyTree, given: PyTree) -> tuple[jax.Array, PyTree]:
        if self.loss is None:
            return jnp.float32(jnp.nan), given
        loss = jax.checkpoint(self.loss) if self.checkpointing else self.loss
        return jax.value_and_grad(loss)(params, given)
