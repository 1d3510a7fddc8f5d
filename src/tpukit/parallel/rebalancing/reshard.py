"""Move live arrays to another layout, bit for bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ...annotations import PyTree
from ...errors import ShardingError
from ..experts.moves import reorder_experts
from ..experts.placement import ExpertPlacement
from ..sharding.layout import Layout
from ..sharding.trees import describe_parameters, open_model


def reshard(tree: PyTree, new: Layout | ExpertPlacement | Sharding | PyTree) -> PyTree:
    """Return the same tree with its arrays where `new` wants them; no value changes.

    Args:
        tree: A model of any kind, an optimizer state, a training state or one array.
        new: A `Layout` (arrays are found by path, so optimizer states follow the parameters), an
            `ExpertPlacement` (expert weights and router outputs are reordered, each on the
            devices it already uses), one sharding for every array, or a tree of shardings.

    Raises:
        ShardingError: The layout's mesh has no devices, or the trees differ.
    """
    opened = open_model(tree)
    if isinstance(new, ExpertPlacement):
        return opened.close(_reorder_experts(opened.tree, new))
    leaves, structure = jax.tree.flatten(opened.tree)
    if isinstance(new, Layout):
        # What is no array is None among shardings, and so are places that a tree leaves empty.
        wanted = structure.flatten_up_to(new.for_optimizer_state(opened.tree))
    elif isinstance(new, Sharding):
        wanted = [new] * len(leaves)
    else:
        wanted = _leaves_with_none(open_model(new).tree)
    if len(wanted) != len(leaves):
        raise ShardingError(
            f"reshard() got {len(wanted)} shardings for {len(leaves)} arrays; "
            "pass a tree of shardings with the structure of the arrays, or a Layout."
        )
    moved = [move(leaf, sharding) for leaf, sharding in zip(leaves, wanted, strict=True)]
    return opened.close(jax.tree.unflatten(structure, moved))


def move(value: Any, sharding: Sharding | None) -> Any:
    """One array on `sharding`; what is not an array, or has no sharding, is returned as it is.

    Raises:
        ShardingError: The sharding's mesh has no devices.
    """
    if sharding is None or not hasattr(value, "dtype"):
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        raise ShardingError(
            "Arrays cannot be moved to an abstract mesh, which has no devices; "
            "use create_mesh(), or pass ShapeDtypeStructs."
        )
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return _identity(sharding)(value)
    # Every process holds the whole value: each fills in the shards of its own devices.
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = move(jax.random.key_data(value), _with_trailing_whole(sharding, value.ndim))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _reorder_experts(tree: PyTree, placement: ExpertPlacement) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    parameters = describe_parameters(tree)
    moved: list[Any] = []
    found = False
    for leaf, parameter in zip(leaves, parameters, strict=True):
        dims = () if parameter is None else parameter.dims
        along = [
            index
            for index, dim in enumerate(dims)
            if dim in ("expert", "router") and leaf.shape[index] == len(placement.order)
        ]
        found = found or bool(along)
        for index in along:
            leaf = reorder_experts(leaf, placement.order, index)
        moved.append(leaf)
    if not found:
        raise ShardingError(
            f"reshard() found no array with {len(placement.order)} experts to reorder; "
            "keep them in one array called 'experts', or label its dimension 'expert'."
        )
    return jax.tree.unflatten(structure, moved)


def _identity(sharding: Sharding) -> Any:
    return jax.jit(lambda value: value, out_shardings=sharding)


def _with_trailing_whole(sharding: Sharding, rank: int) -> Sharding:
    """The sharding of a key array's raw words: one more dimension, kept whole."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec)), None]
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


def _leaves_with_none(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda node: node is None)
