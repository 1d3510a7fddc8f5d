"""Everything a training step reads and writes, as one pytree."""

from dataclasses import dataclass
from typing import Any

import jax


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

    step: Any
    params: Any
    opt_state: Any
    model_state: Any
