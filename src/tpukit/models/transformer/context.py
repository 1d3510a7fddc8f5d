"""What every layer of one forward pass shares."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from ..execution import Execution
from .mixing import Mixing, SharedKeys, WholeSequences


@dataclass(frozen=True)
class LayerContext:
    """What the layers of one forward pass share.

    Attributes:
        positions: (B, S) index of each token in its document.
        length: Tokens that a sequence can have in this pass, its cache included.
        execution: How the model runs.
        mixing: What layers mix tokens with.
        shared: Keys of layers that others take them from, by the kind of the former.
        per_layer: (B, S, width) this layer's own embedding of the tokens, where it has one.
    """

    positions: jax.Array
    length: int
    execution: Execution
    mixing: Mixing
    shared: Mapping[str, SharedKeys] = field(default_factory=dict[str, SharedKeys])
    per_layer: jax.Array | None = None

    @classmethod
    def of_training(
        cls, positions: jax.Array, segment_ids: jax.Array | None, execution: Execution
    ) -> "LayerContext":
        """Whole sequences, of which nothing is kept."""
        mixing = WholeSequences(execution, segment_ids)
        return cls(positions, positions.shape[1], execution, mixing)

    def replace(self, **changes: Any) -> "LayerContext":
        """The same with some things changed."""
        return dataclasses.replace(self, **changes)
