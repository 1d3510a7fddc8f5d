"""Tensors out of nested arguments and results, and back into them."""

from collections.abc import Sequence
from typing import Any

from .environment import torch_trees

# What is the same in every call of a program. Of a result, anything else that is no tensor is
# dropped: a cache of keys and values, say, holds tensors that must not leave the program.
PLAIN = (bool, int, float, complex, str)


class Nesting:
    """Where tensors stand in nested containers, and what stands beside them.

    Two are equal where they nest alike, with equal values beside the tensors.
    """

    def __init__(self, tree: Any, others: Sequence[Any], is_tensor: Sequence[bool]) -> None:
        self._tree, self._others, self._is_tensor = tree, others, is_tensor
        self._key = (str(tree), repr(others), tuple(is_tensor))

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """Return the containers with these tensors in their places."""
        left = iter(tensors)
        filled = [
            next(left) if yes else other
            for yes, other in zip(self._is_tensor, self._others, strict=True)
        ]
        return torch_trees().tree_unflatten(filled, self._tree)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Nesting) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def take_apart(
    nested: Any, kind: type | None = None, *, only_plain: bool = False
) -> tuple[list[Any], Nesting]:
    """Return the tensors in nested containers, and the way back.

    Args:
        nested: Lists, tuples, dicts and whatever else torch knows as a container.
        kind: What counts as a tensor; torch's own by default.
        only_plain: Whether what is neither a tensor nor a plain value becomes None.
    """
    import torch

    kind = torch.Tensor if kind is None else kind
    leaves, tree = torch_trees().tree_flatten(nested)
    is_tensor = [isinstance(leaf, kind) for leaf in leaves]
    others = [
        None if yes or (only_plain and not isinstance(leaf, PLAIN)) else leaf
        for leaf, yes in zip(leaves, is_tensor, strict=True)
    ]
    tensors = [leaf for leaf, yes in zip(leaves, is_tensor, strict=True) if yes]
    return tensors, Nesting(tree, others, is_tensor)
