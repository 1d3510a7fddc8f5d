"""Which layer a parameter belongs to, told from its path in the tree of parameters."""

from typing import Any, NamedTuple

import jax


class Layer(NamedTuple):
    """One layer of a model.

    Attributes:
        path: Of its parameters in the tree.
        numbered: Whether it is one of several alike, by a number at the end of the path.
    """

    path: tuple[str, ...]
    numbered: bool


def layer_names(params: Any) -> list[Layer]:
    """The layer of every leaf of `params`, in the order of its leaves."""
    paths = [
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    # What all have in common ("params") tells no layers apart.
    shared = next(
        (place for place, names in enumerate(zip(*paths, strict=False)) if len({*names}) > 1), 0
    )
    return [_layer(path[shared:]) for path in paths]


def _layer(names: tuple[str, ...]) -> Layer:
    """The path up to its first number, else its first part.

    Example:
        ("layers", "3", "up", "kernel") -> ("layers", "3"); ("head", "kernel") -> ("head",)
    """
    for place, name in enumerate(names):
        if name[-1:].isdigit():
            return Layer(names[: place + 1], True)
    return Layer(names[:1], False)
