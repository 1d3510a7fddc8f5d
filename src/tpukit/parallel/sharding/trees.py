"""Flatten any model into named arrays: flax nnx and linen, equinox, or a plain pytree."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey

from ...annotations import PyTree
from ...frameworks import is_instance_of
from .dimensions import DIMENSIONS, Dims, Parameter, find_stacks, infer_dims

# Where flax keeps the names of a variable's dimensions; `dims` is tpukit's, for nnx.Param(x,
# dims=...).
_NAME_KEYS = ("dims", "out_sharding")


@dataclass(frozen=True)
class OpenModel:
    """A model as a pytree of arrays, and the function that rebuilds the same kind of object."""

    tree: PyTree
    close: Callable[[Any], Any]


@dataclass(frozen=True)
class ModelLeaf:
    """One leaf of a model.

    Attributes:
        path: Names joined by "/", without flax's box around a value.
        value: An array, a ShapeDtypeStruct, or any other leaf.
        names: Dimension or mesh axis names that came with the array.
    """

    path: str
    value: Any
    names: tuple[Any, ...] | None = None

    @property
    def is_array(self) -> bool:
        """Whether this leaf has a sharding."""
        return hasattr(self.value, "shape") and hasattr(self.value, "dtype")


def open_model(model: Any) -> OpenModel:
    """Open a model; only nnx modules need it, other models are pytrees already."""
    # A module's graph may share variables (tied embeddings); a plain tree map would copy them.
    if is_instance_of(model, "flax.nnx"):
        from flax import nnx

        graph, state = nnx.split(model)
        return OpenModel(state, lambda new_state: nnx.merge(graph, new_state))
    return OpenModel(model, lambda new_tree: new_tree)


def named_leaves(tree: PyTree) -> list[ModelLeaf]:
    """Return every leaf of a tree in the order of `jax.tree.leaves`."""
    leaves: list[ModelLeaf] = []
    for outer_path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_box)[0]:
        if _is_box(node):
            names = _names_of(node)
            for inner_path, value in jax.tree_util.tree_flatten_with_path(node)[0]:
                leaves.append(ModelLeaf(join_path((*outer_path, *inner_path)), value, names))
        else:
            leaves.append(ModelLeaf(join_path(outer_path), node))
    return leaves


def join_path(path: Sequence[Any]) -> str:
    """Return the names of a jax key path, joined by "/", without flax's final `.value`."""
    last: Any = path[-1] if path else None
    # A dict key "value" is the value projection of an attention; an attribute is flax's box.
    if isinstance(last, GetAttrKey) and last.name in ("value", "raw_value"):
        path = path[:-1]
    return "/".join(_word(entry) for entry in path)


def describe_parameters(
    tree: PyTree, *, stacked: Sequence[str] = (), head_counts: Mapping[str, int] | None = None
) -> list[Parameter | None]:
    """Describe every leaf of a tree; None for those that are not arrays.

    Args:
        tree: Arrays or ShapeDtypeStructs.
        stacked: Regular expressions for paths whose first dimension counts layers.
        head_counts: How many "heads" and "kv_heads" there are, where they are merged with
            `head_dim` into one dimension.
    """
    leaves = named_leaves(tree)
    shapes = {leaf.path: tuple(leaf.value.shape) for leaf in leaves if leaf.is_array}
    weights = {
        leaf.path: shapes[leaf.path] for leaf in leaves if leaf.is_array and _is_weight(leaf)
    }
    stacks = find_stacks(weights, hints=stacked)
    return [
        _describe(leaf, shapes[leaf.path], leaf.path in stacks, head_counts or {})
        if leaf.is_array
        else None
        for leaf in leaves
    ]


def label_dims(names: Sequence[Any], rank: int) -> Dims | None:
    """Convert labels that came with an array to dimensions, or None if they match none.

    Labels for one layer fit its stacked array: the missing first one counts layers.
    """
    labels = _for_stack(names, rank, "layers")
    if len(labels) != rank or not any(name in DIMENSIONS for name in names):
        return None
    return tuple(label if label in DIMENSIONS else None for label in labels)


def _for_stack(names: Sequence[Any], rank: int, first: str | None) -> tuple[Any, ...]:
    return (first, *names) if len(names) == rank - 1 else tuple(names)


def _describe(
    leaf: ModelLeaf, shape: tuple[int, ...], is_stacked: bool, head_counts: Mapping[str, int]
) -> Parameter:
    is_weight = _is_weight(leaf)
    dims = label_dims(leaf.names, len(shape)) if leaf.names else None
    labelled, guessed = dims is not None, False
    if dims is None and is_weight:
        dims, guessed = infer_dims(leaf.path, shape, stacked=is_stacked)
    dims = dims or (None,) * len(shape)
    return Parameter(
        path=leaf.path,
        shape=shape,
        itemsize=int(leaf.value.dtype.itemsize),
        dims=dims,
        units=tuple(
            head_counts.get(dim or "", size) for dim, size in zip(dims, shape, strict=True)
        ),
        guessed=guessed,
        axis_labels=() if labelled or not leaf.names else _for_stack(leaf.names, len(shape), None),
        is_weight=is_weight,
    )


def _is_weight(leaf: ModelLeaf) -> bool:
    """Whether it is a floating-point array or an integer matrix, such as a quantized weight."""
    dtype = leaf.value.dtype
    if jnp.issubdtype(dtype, jnp.inexact):
        return True
    return bool(jnp.issubdtype(dtype, jnp.integer)) and len(leaf.value.shape) > 1


def _is_box(node: Any) -> bool:
    """Whether this is a flax box: an nnx Variable or a linen Partitioned."""
    return hasattr(node, "get_metadata") or (hasattr(node, "names") and hasattr(node, "unbox"))


def _names_of(box: Any) -> tuple[Any, ...] | None:
    names: Any
    if hasattr(box, "get_metadata"):
        metadata: dict[str, Any] = box.get_metadata()
        names = next((metadata[key] for key in _NAME_KEYS if metadata.get(key)), None)
    else:
        names = box.names
    # flax also accepts full shardings here; only plain names are of dimensions or axes.
    plain = isinstance(names, list | tuple | PartitionSpec)
    return tuple(cast("Sequence[Any]", names)) if plain else None


def _word(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
