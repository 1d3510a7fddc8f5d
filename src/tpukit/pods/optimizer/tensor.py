"""`DistributedTensor`: an array over the devices of a pod that a step changes in place."""

from typing import Any

import jax
import numpy as np

from ...annotations import PyTree


class DistributedTensor:
    """Holds the newest value of a parameter; jax and numpy take it as an array.

    jax's arrays never change, and document 004 steps parameters in place: this is the place.

    Attributes:
        value: The array as the last step left it.
    """

    def __init__(self, value: jax.Array) -> None:
        self.value = value

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        return self.value.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its number format."""
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return self.value.ndim

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """Where its parts lie."""
        return self.value.sharding

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype=dtype)

    def __repr__(self) -> str:
        return f"DistributedTensor({self.dtype}{list(self.shape)} on {self.sharding.num_devices})"


def values_of(tree: PyTree) -> PyTree:
    """Return a tree with arrays where it holds distributed tensors."""
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, DistributedTensor) else leaf, tree
    )


def store_values(tree: PyTree, values: PyTree) -> None:
    """Put new values into the distributed tensors of a tree."""
    for leaf, value in zip(jax.tree.leaves(tree), jax.tree.leaves(values), strict=True):
        if isinstance(leaf, DistributedTensor):
            leaf.value = value
