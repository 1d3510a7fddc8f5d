"""Shard a model by the name of a strategy, remove its padding, and validate shardings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import RenderableType
from rich.table import Table

from ...annotations import AnyMesh, PyTree
from ...errors import ShardingError
from ...plain_data import JsonObject
from ...shown import Shown
from ..mesh.axes import spec_for_shape
from ..mesh.mesh import axis_sizes
from ..rebalancing import reshard
from .layout import Layout, make_layout
from .report import show_spec
from .rules import Rules, check_axes, check_fits, spec_entries
from .trees import ModelLeaf, named_leaves, open_model

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
    """Return the same model with its arrays sharded over a mesh.

    A flax nnx module is returned as an nnx module, linen variables as linen variables, an equinox
    module as an equinox module, any pytree as itself; the values are the same. ShapeDtypeStructs
    are returned with their sharding attached. The arguments are those of `make_layout`.

    With `pad=True` hidden units (`mlp`) and vocabularies may gain zeros. Extra hidden units add
    exactly nothing. An embedding's extra rows are never looked up. An output head's extra columns
    give extra logits of zero: slice them off before a softmax. `unpad` restores the originals.

    Raises:
        ShardingError: See `make_layout`; or the mesh is abstract and the model has arrays.
    """
    layout = make_layout(
        model, mesh, strategy, rules=rules, pad=pad, stacked=stacked, head_counts=head_counts
    )
    padded = _resize(model, layout, to_placed=True) if pad else model
    return reshard(padded, layout)


def unpad(tree: Model, layout: Layout) -> Model:
    """Cut arrays back to their shapes before padding, exactly.

    Args:
        tree: The padded model, or an optimizer state made from it.
        layout: The result of `make_layout(..., pad=True)` for the unpadded model.
    """
    return _resize(tree, layout, to_placed=False)


def get_sharding_spec(
    shape: Sequence[int], axis_names: Sequence[str] = ("data", "model")
) -> PartitionSpec:
    """Return a tensor's default sharding: first dimension by the first axis, last by the second."""
    return PartitionSpec(*spec_for_shape(shape, axis_names))


def _resize(tree: PyTree, layout: Layout, *, to_placed: bool) -> PyTree:
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


LINES_SHOWN = 12


@dataclass(frozen=True)
class ShardingReport(Shown):
    """Arrays that have their expected sharding: path, shape and sharding of each."""

    arrays: tuple[tuple[str, tuple[int, ...], PartitionSpec], ...]

    def to_dict(self) -> JsonObject:
        """Return the report as JSON data."""
        return {
            "arrays": [
                {
                    "path": path,
                    "shape": list(shape),
                    "spec": [list(entry) for entry in spec_entries(spec, len(shape))],
                }
                for path, shape, spec in self.arrays
            ]
        }

    def __rich__(self) -> RenderableType:
        """Return a table with a row per array."""
        table = Table("array", "shape", "spec", title=f"{len(self.arrays)} arrays in place")
        for path, shape, spec in self.arrays:
            table.add_row(path or "(array)", " x ".join(map(str, shape)), show_spec(spec))
        return table


def validate_sharding(
    array_or_tree: PyTree, mesh: AnyMesh, expected: PyTree = None
) -> ShardingReport:
    """Check that arrays are on `mesh`, sharded as expected.

    Two shardings that put the same elements on the same devices are equal, however written.

    Args:
        array_or_tree: An array, a model of any kind, or any tree of arrays.
        mesh: The mesh they should be on.
        expected: A PartitionSpec for all arrays, a tree of specs, a `Layout`, the name of a
            strategy, or None for the default sharding of each shape (`get_sharding_spec`).

    Raises:
        ShardingError: With a line for each array that has another sharding.
    """
    tree = open_model(array_or_tree).tree
    leaves = named_leaves(tree)
    specs = _expected_specs(tree, leaves, mesh, expected)
    wrong: list[str] = []
    right: list[tuple[str, tuple[int, ...], PartitionSpec]] = []
    for leaf, spec in zip(leaves, specs, strict=True):
        if spec is None:
            continue
        shape = tuple(leaf.value.shape)
        entries = spec_entries(spec, len(shape))
        check_axes(spec, axis_sizes(mesh), what=f"The spec expected of {leaf.path or 'the array'}")
        check_fits(leaf.path or "array", shape, (None,) * len(shape), entries, axis_sizes(mesh))
        seen = _difference(leaf.value, NamedSharding(mesh, spec))
        if seen is None:
            right.append((leaf.path, shape, spec))
        else:
            wrong.append(f"{leaf.path or 'array'} {shape}: {seen}, expected {show_spec(spec)}")
    if wrong:
        more = [f"... and {len(wrong) - LINES_SHOWN} more"] if len(wrong) > LINES_SHOWN else []
        lines = "\n  ".join([*wrong[:LINES_SHOWN], *more])
        raise ShardingError(
            f"{len(wrong)} of {len(wrong) + len(right)} arrays are not split as expected; "
            f"move them with reshard(), or correct what is expected:\n  {lines}"
        )
    return ShardingReport(tuple(right))


def _expected_specs(
    tree: PyTree, leaves: list[ModelLeaf], mesh: AnyMesh, expected: PyTree
) -> list[PartitionSpec | None]:
    if expected is None:
        names = tuple(axis_sizes(mesh))
        return [
            PartitionSpec(*spec_for_shape(leaf.value.shape, names)) if leaf.is_array else None
            for leaf in leaves
        ]
    if isinstance(expected, PartitionSpec):
        return [expected if leaf.is_array else None for leaf in leaves]
    if isinstance(expected, str):
        expected = make_layout(tree, mesh, expected)
    if isinstance(expected, Layout):
        specs = _flat(expected.for_optimizer_state(tree))
    else:
        specs = _flat(open_model(expected).tree)
    if len(specs) != len(leaves):
        raise ShardingError(
            f"validate_sharding() got {len(specs)} specs for {len(leaves)} leaves; "
            "pass a tree of specs with the structure of the arrays."
        )
    return [spec.spec if isinstance(spec, NamedSharding) else spec for spec in specs]


def _difference(value: Any, expected: NamedSharding) -> str | None:
    """Return how an array's sharding differs from the expected one, or None."""
    sharding = getattr(value, "sharding", None)
    if sharding is None:
        return f"not on any device ({type(value).__name__})"
    if sharding.is_equivalent_to(expected, len(value.shape)):
        return None
    if not isinstance(sharding, NamedSharding):
        devices = len(sharding.device_set)
        return f"on {devices} device{'s' if devices != 1 else ''} outside the mesh"
    if sharding.mesh != expected.mesh:
        sizes = ", ".join(f"{axis}={size}" for axis, size in axis_sizes(sharding.mesh).items())
        return f"{show_spec(sharding.spec)} on another mesh ({sizes})"
    return f"split {show_spec(sharding.spec)}"


def _flat(tree: PyTree) -> list[Any]:
    return jax.tree.leaves(
        tree, is_leaf=lambda node: node is None or isinstance(node, PartitionSpec)
    )
