"""Trees of arrays as few long vectors: one message instead of one for each parameter."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ...annotations import PyTree


@dataclass(frozen=True)
class LeafPacking:
    """Where each leaf of a tree lies in vectors, one for each number format.

    Attributes:
        members: Leaves of each format, by number.
        multiple: Vectors are filled up with zeros to a multiple of this.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    members: dict[str, tuple[int, ...]]
    multiple: int

    @classmethod
    def of(cls, tree: PyTree, *, multiple: int) -> "LeafPacking":
        """Return the packing of trees like this one."""
        leaves, structure = jax.tree.flatten(tree)
        members: dict[str, tuple[int, ...]] = {}
        for number, leaf in enumerate(leaves):
            name = str(jnp.result_type(leaf))
            members[name] = (*members.get(name, ()), number)
        shapes = tuple(tuple(jnp.shape(leaf)) for leaf in leaves)
        return cls(structure, shapes, members, multiple)

    def size(self, name: str) -> int:
        """Return the length of the vector of a format."""
        whole = sum(prod(self.shapes[number]) for number in self.members[name])
        return -(-whole // self.multiple) * self.multiple

    @property
    def bytes(self) -> int:
        """Of all vectors together."""
        return sum(self.size(name) * jnp.dtype(name).itemsize for name in self.members)

    def pack(self, tree: PyTree) -> dict[str, jax.Array]:
        """Return the vectors of a tree."""
        leaves = jax.tree.leaves(tree)
        return {
            name: _joined([leaves[number] for number in numbers], self.size(name))
            for name, numbers in self.members.items()
        }

    def unpack(self, vectors: dict[str, jax.Array]) -> PyTree:
        """Return the tree of some vectors."""
        leaves: list[Any] = [None] * len(self.shapes)
        for name, numbers in self.members.items():
            at = 0
            for number in numbers:
                size = prod(self.shapes[number])
                leaves[number] = vectors[name][at : at + size].reshape(self.shapes[number])
                at += size
        return jax.tree.unflatten(self.structure, leaves)


def _joined(leaves: Sequence[jax.Array], size: int) -> jax.Array:
    joined = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
    return jnp.pad(joined, (0, size - joined.size))
