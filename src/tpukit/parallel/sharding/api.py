"""Shard a whole model by the name of a strategy, and get the padding back off it."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...annotations import AnyMesh
from ..mesh.axes import spec_for_shape
from ..rebalancing.reshard import reshard
from .layout import Layout, make_layout
from .rules import Rules
from .trees import named_leaves, open_model

Model = TypeVar("Model")


def shard_model(
    model: Model,
    mesh: AnyMesh,
    strategy: str | None = "fsdp",
    *,
    rules: Rules | None = None,
    pad: bool = False,
    stacked: Sequence[str] = (),
    head_counts: Mapping[str, int] | None = None,
) -> Model:
    """Return the same model with its arrays spread over a mesh.

    A flax nnx module comes back as an nnx module, linen variables as linen variables, an equinox
    module as an equinox module, any pytree as itself; the values are the same. ShapeDtypeStructs
    come back with their sharding attached. The arguments are those of `make_layout`.

    With `pad=True` hidden units (`mlp`) and vocabularies may gain zeros. Extra hidden units add
    exactly nothing. An embedding's extra rows are never looked up. An output head's extra columns
    give extra logits of zero: slice them off before a softmax. `unpad` restores the originals.

    Raises:
        ShardingError: See `make_layout`; or the mesh is abstract and the model holds arrays.
    """
    layout = make_layout(
        model, mesh, strategy, rules=rules, pad=pad, stacked=stacked, head_counts=head_counts
    )
    padded = _resize(model, layout, to_placed=True) if pad else model
    return reshard(padded, layout)


def unpad(tree: Model, layout: Layout) -> Model:
    """Cut arrays back to the shapes they had before padding, exactly.

    Args:
        tree: The padded model, or an optimizer state made from it.
        layout: What `make_layout(..., pad=True)` returned for the unpadded model.
    """
    return _resize(tree, layout, to_placed=False)


def get_sharding_spec(
    shape: Sequence[int], axis_names: Sequence[str] = ("data", "model")
) -> PartitionSpec:
    """The default split of a tensor: first dimension by the first axis, last by the second."""
    return PartitionSpec(*spec_for_shape(shape, axis_names))


def _resize(tree: Any, layout: Layout, *, to_placed: bool) -> Any:
    opened = open_model(tree)
    resized: list[Any] = []
    for leaf in named_leaves(opened.tree):
        placement = layout.find(leaf.path) if leaf.is_array else None
        value = leaf.value
        if placement is not None and placement.shape != placement.placed_shape:
            old, new = placement.placed_shape, placement.shape
            if to_placed:
                old, new = new, old
            if tuple(value.shape) == old:
                value = _grow(value, new) if to_placed else value[tuple(map(slice, new))]
        resized.append(value)
    return opened.close(jax.tree.unflatten(jax.tree.structure(opened.tree), resized))


def _grow(value: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, value.dtype)
    return jnp.pad(value, [(0, new - old) for old, new in zip(value.shape, shape, strict=True)])
