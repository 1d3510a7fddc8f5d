"""Where thin matrices lie on a mesh: cut where their weight is, and never through the rank."""

import math
import re
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ...annotations import AnyMesh, PyTree
from ...parallel.mesh.axes import axes_with_role
from ...parallel.mesh.mesh import axis_sizes
from ...parallel.sharding.layout import Layout, make_layout
from ...parallel.sharding.rules import entries_spec, spec_entries
from ...parallel.sharding.trees import join_path


def thin_layout(params: PyTree, base: Layout) -> Layout:
    """The layout of thin matrices beside weights that lie as `base` says.

    `a` is cut along its inputs and `b` along its outputs: over the axes that cut the weight there,
    and over the `fsdp` axes of its other side where they divide what is left.

    Args:
        params: `a` and `b` under the path of each weight, arrays or their shapes.
        base: Of the weights.
    """
    named = jax.tree_util.tree_leaves_with_path(params)
    specs = {join_path(path): _spec(join_path(path), leaf, base) for path, leaf in named}
    rules = [(f"^{re.escape(path)}$", spec) for path, spec in specs.items()]
    # Where the strategy cuts nothing, nobody is to be warned that nothing is cut.
    return make_layout(params, base.mesh, None, rules=rules if any(specs.values()) else None)


def _spec(path: str, thin: Any, base: Layout) -> PartitionSpec:
    weight, which = path.rsplit("/", 1)
    placed = base.find(weight)
    assert placed is not None, path
    *stack, inputs, outputs = spec_entries(placed.spec, len(thin.shape))
    if which == "a":
        return entries_spec([*stack, _cut(thin.shape[-2], inputs, outputs, base.mesh), ()])
    return entries_spec([*stack, (), _cut(thin.shape[-1], outputs, inputs, base.mesh)])


def _cut(
    size: int, own: tuple[str, ...], others: tuple[str, ...], mesh: AnyMesh
) -> tuple[str, ...]:
    sizes = axis_sizes(mesh)
    both = (*own, *axes_with_role(others, "fsdp"))
    return own if size % math.prod(sizes[axis] for axis in both) else both
