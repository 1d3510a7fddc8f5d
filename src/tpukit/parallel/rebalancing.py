"""Find overloaded devices on a mesh and a better sharding, and move arrays to new shardings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike
from rich.console import RenderableType
from rich.table import Table

from ..annotations import PyTree
from ..errors import ShardingError
from ..plain_data import JsonObject
from ..shown import Shown
from .experts.placement import ExpertPlacement, balance, reorder_experts
from .sharding.layout import Layout
from .sharding.report import show_spec
from .sharding.rules import spec_entries
from .sharding.trees import describe_parameters, open_model

# A device is a hotspot with this many times the mean load, unless a threshold is given.
HOT_OVER_MEAN = 1.25


@dataclass(frozen=True)
class ShardingAdvice(Shown):
    """The sharding that balances a measured load.

    Attributes:
        spec: How to shard (rows, columns), that is (batch, hidden), over the mesh axes.
        hotspots: Devices of the grid that are over the threshold now.
        imbalance: Load of the busiest device over the mean for each candidate; "as measured" for
            the sharding the load was measured with, predicted for the others (even load inside a
            block).
    """

    spec: PartitionSpec
    hotspots: tuple[tuple[int, ...], ...]
    imbalance: dict[str, float]

    @property
    def imbalance_before(self) -> float:
        """Load of the busiest device over the mean, as measured."""
        return self.imbalance["as measured"]

    @property
    def imbalance_after(self) -> float:
        """Load of the busiest device over the mean, predicted for the chosen sharding."""
        return min(self.imbalance.values())

    def to_dict(self) -> JsonObject:
        """Return the advice as JSON data."""
        return {
            "spec": [list(entry) for entry in spec_entries(self.spec, 2)],
            "hotspots": [list(position) for position in self.hotspots],
            "imbalance": {
                name: {"value": value, "origin": "measured" if name == "as measured" else "model"}
                for name, value in self.imbalance.items()
            },
        }

    def __rich__(self) -> RenderableType:
        """Return a table with a row per candidate sharding."""
        table = Table(title=f"split by ({show_spec(self.spec)}), {len(self.hotspots)} hot spots")
        table.add_column("split")
        table.add_column("busiest / mean", justify="right")
        for name, value in self.imbalance.items():
            table.add_row(name, f"{value:.3f}")
        return table


def detect_hotspots(load: ArrayLike, threshold: float | None = None) -> list[tuple[int, ...]]:
    """Return the index of every device whose load is above `threshold`, in index order.

    Both are compared in the load's own dtype, so that 0.8 in float32 is not above 0.8.

    Args:
        load: Load of each device or expert, of any shape: devices of a mesh, experts by layer, ...
        threshold: In the units of the load; None is 1.25 times the mean.

    Raises:
        ShardingError: The load is empty or has a value that is not finite.
    """
    values = _check_load(load)
    limit = HOT_OVER_MEAN * float(values.mean()) if threshold is None else threshold
    format = np.asarray(load).dtype
    if threshold is not None and jnp.issubdtype(format, jnp.floating):
        limit = float(np.asarray(threshold, format))
    return [tuple(int(index) for index in position) for position in np.argwhere(values > limit)]


def optimize_sharding(
    load: ArrayLike,
    *,
    axis_names: Sequence[str] = ("data", "model"),
    threshold: float | None = None,
) -> ShardingAdvice:
    """Choose how to shard a (batch, hidden) computation from the measured load of each device.

    `load[i, j]` is the load of the device at (i, j), with row block i and column block j. Sharding
    rows over both axes spreads each row block over the devices of its row; sharding columns over
    both spreads each column block over its column. The lower maximum wins. For experts use
    `balance_experts`.

    Args:
        load: A 2-D grid as large as the mesh.
        axis_names: The mesh axes of the grid's two dimensions.
        threshold: Passed to `detect_hotspots`.

    Raises:
        ShardingError: The load is not a 2-D grid of finite numbers, or there are not two names.
    """
    values = _check_load(load)
    names = tuple(axis_names)
    if values.ndim != 2 or len(names) != 2:
        raise ShardingError(
            f"optimize_sharding() got a load of shape {values.shape} and axes {names}; it needs a "
            "2-D grid, one number per device, and two axis names. For experts use "
            "balance_experts()."
        )
    rows, columns = names
    candidates = {
        "as measured": (PartitionSpec(rows, columns), balance(values.reshape(-1).tolist())),
        f"rows over {rows}+{columns}": (
            PartitionSpec((rows, columns), None),
            balance(values.mean(axis=1).tolist()),
        ),
        f"columns over {rows}+{columns}": (
            PartitionSpec(None, (rows, columns)),
            balance(values.mean(axis=0).tolist()),
        ),
    }
    # min() keeps the first of equals, so the present sharding stays unless another is better.
    spec, _ = min(candidates.values(), key=lambda candidate: candidate[1])
    return ShardingAdvice(
        spec=spec,
        hotspots=tuple(detect_hotspots(values, threshold)),
        imbalance={name: figure for name, (_, figure) in candidates.items()},
    )


def _check_load(load: ArrayLike) -> np.ndarray:
    values = np.asarray(load, dtype=np.float64)
    if not values.size or not np.isfinite(values).all():
        raise ShardingError(
            f"The load of shape {values.shape} is empty or has values that are not finite; "
            "pass one finite number for each device."
        )
    return values


def reshard(tree: PyTree, new: Layout | ExpertPlacement | Sharding | PyTree) -> PyTree:
    """Return the same tree with its arrays on new shardings; no value changes.

    Args:
        tree: A model of any kind, an optimizer state, a training state or one array.
        new: A `Layout` (arrays are found by path, so optimizer states follow the parameters), an
            `ExpertPlacement` (expert weights and router outputs are reordered, each on the devices
            it already uses), one sharding for every array, or a tree of shardings.

    Raises:
        ShardingError: The layout's mesh has no devices, or the trees differ.
    """
    opened = open_model(tree)
    if isinstance(new, ExpertPlacement):
        return opened.close(_reorder_experts(opened.tree, new))
    leaves, structure = jax.tree.flatten(opened.tree)
    if isinstance(new, Layout):
        # Leaves that are not arrays are None among shardings, and so are empty places of a tree.
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
    """Return one array on `sharding`; a leaf without sharding or that is no array is unchanged.

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
    # Every process has the full value and fills in the shards of its own devices.
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = move(jax.random.key_data(value), _with_trailing_dimension(sharding, value.ndim))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _reorder_experts(tree: PyTree, placement: ExpertPlacement) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    parameters = describe_parameters(tree)
    moved: list[Any] = []
    is_reordered = False
    for leaf, parameter in zip(leaves, parameters, strict=True):
        dims = () if parameter is None else parameter.dims
        along = [
            index
            for index, dim in enumerate(dims)
            if dim in ("expert", "router") and leaf.shape[index] == len(placement.order)
        ]
        is_reordered = is_reordered or bool(along)
        for index in along:
            leaf = reorder_experts(leaf, placement.order, index)
        moved.append(leaf)
    if not is_reordered:
        raise ShardingError(
            f"reshard() found no array with {len(placement.order)} experts to reorder; "
            "keep them in one array called 'experts', or label its dimension 'expert'."
        )
    return jax.tree.unflatten(structure, moved)


def _identity(sharding: Sharding) -> Any:
    return jax.jit(lambda value: value, out_shardings=sharding)


def _with_trailing_dimension(sharding: Sharding, rank: int) -> Sharding:
    """Return the sharding of a key array's raw words: one more dimension, not sharded."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec)), None]
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


def _leaves_with_none(tree: PyTree) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda node: node is None)
