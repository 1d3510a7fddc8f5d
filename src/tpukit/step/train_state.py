"""Everything a training step reads and writes, as one pytree."""

from dataclasses import dataclass

import jax

from ..annotations import PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state between two steps.

    Attributes:
        step: How many steps were taken, an int32 scalar.
        params: The trained parameters.
        opt_state: The optimizer's state, laid out like the parameters.
        model_state: What the model carries without training it (batch statistics); often {}.
    """

    step: PyTree
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
