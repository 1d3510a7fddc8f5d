"""Check that arrays are where they should be, and say which are not."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import RenderableType
from rich.table import Table

from ...annotations import AnyMesh, PyTree
from ...errors import ShardingError
from ...shown import Shown
from ..mesh.axes import spec_for_shape
from ..mesh.mesh import axis_sizes
from .layout import Layout, make_layout
from .report import show_spec
from .rules import check_axes, check_fits, spec_entries
from .trees import ModelLeaf, named_leaves, open_model

LINES_SHOWN = 12


@dataclass(frozen=True)
class ShardingReport(Shown):
    """Arrays that were checked and found in place: path, shape and split of each."""

    arrays: tuple[tuple[str, tuple[int, ...], PartitionSpec], ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
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
        """A row for each array."""
        table = Table("array", "shape", "spec", title=f"{len(self.arrays)} arrays in place")
        for path, shape, spec in self.arrays:
            table.add_row(path or "(array)", " x ".join(map(str, shape)), show_spec(spec))
        return table


def validate_sharding(
    array_or_tree: PyTree, mesh: AnyMesh, expected: PyTree = None
) -> ShardingReport:
    """Check that arrays live on `mesh`, split as expected.

    Two splits that put the same elements on the same devices are the same, however written.

    Args:
        array_or_tree: An array, a model of any kind, or any tree of arrays.
        mesh: The mesh they should live on.
        expected: A PartitionSpec for all arrays, a tree of specs, a `Layout`, the name of a
            strategy, or None for the default split of each shape (`get_sharding_spec`).

    Raises:
        ShardingError: With a line for each array that is not where it should be.
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
    tree: Any, leaves: list[ModelLeaf], mesh: AnyMesh, expected: Any
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
        found = _flat(expected.for_optimizer_state(tree))
    else:
        found = _flat(open_model(expected).tree)
    if len(found) != len(leaves):
        raise ShardingError(
            f"validate_sharding() got {len(found)} specs for {len(leaves)} leaves; "
            "pass a tree of specs with the structure of the arrays."
        )
    return [one.spec if isinstance(one, NamedSharding) else one for one in found]


def _difference(value: Any, expected: NamedSharding) -> str | None:
    """What is wrong with where an array lives, in a few words, or None."""
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


def _flat(tree: Any) -> list[Any]:
    return jax.tree.leaves(
        tree, is_leaf=lambda node: node is None or isinstance(node, PartitionSpec)
    )
