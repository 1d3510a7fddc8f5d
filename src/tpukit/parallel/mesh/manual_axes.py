"""Find the mesh for a function that communicates over a mesh axis, and check the axis."""

import math
from collections.abc import Iterable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from ...annotations import AnyMesh
from ...errors import MeshError, did_you_mean
from .mesh import axis_sizes

Tree = TypeVar("Tree")


def mesh_in_use(mesh: AnyMesh | None, axis: str) -> AnyMesh | None:
    """Return the mesh to map over, or None to compute everything here.

    Inside another `shard_map` (say, a pipeline stage with a ring attention) jax requires the mesh
    that marks the manual axes; outside one, an explicit mesh wins. The mesh in context counts only
    if it has the axis, because it was not passed explicitly.
    """
    current = jax.sharding.get_abstract_mesh()
    if mesh is None:
        return current if axis in current.axis_names else None
    return current if AxisType.Manual in current.axis_types else mesh


def axis_size(mesh: AnyMesh, axis: str, *, needed_for: str) -> int:
    """Return the number of devices along `axis`.

    Raises:
        MeshError: The mesh has no such axis.
    """
    sizes = axis_sizes(mesh)
    if axis not in sizes:
        raise MeshError(
            f"{needed_for} runs over the mesh axis '{axis}', but the mesh has "
            f"{describe_axes(mesh)}.{did_you_mean(axis, sizes)} Add the axis to the mesh, "
            f"or pass axis= with the name of one that is there."
        )
    return sizes[axis]


def copy_each(tree: Tree, copies: int) -> Tree:
    """Return arrays with a new first dimension of equal copies, to be sharded over manual axes.

    Each device gets one copy, as if the array were replicated, but the partitioner sums gradients
    outside the manual region: where other axes are automatic, XLA:CPU aborts on a bfloat16 sum
    inside it.
    """
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (copies, *leaf.shape)), tree)


def whole_key_heads(
    q: jax.Array, k: jax.Array, v: jax.Array, *, mesh: AnyMesh, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return keys and values (B, S, heads, D) whose heads can be sharded over `axes`.

    Where there are fewer key heads than shards, heads are repeated so that each shard has its own.
    """
    sizes = axis_sizes(mesh)
    if k.shape[2] % math.prod(sizes[axis] for axis in axes) == 0:
        return k, v
    each = q.shape[2] // k.shape[2]
    return jnp.repeat(k, each, axis=2), jnp.repeat(v, each, axis=2)


def describe_axes(mesh: AnyMesh) -> str:
    """Return the axes of a mesh for a message: "data=2, model=4"."""
    return ", ".join(f"{name}={size}" for name, size in axis_sizes(mesh).items()) or "no axes"


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """Return every axis name in a partition spec, in order."""
    names: list[str] = []
    for entry in spec:
        if isinstance(entry, str):
            names.append(entry)
        elif isinstance(entry, Iterable):
            names.extend(entry)
    return tuple(names)


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, for messages with valid values."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
