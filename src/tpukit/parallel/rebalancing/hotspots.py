"""Find where load piles up on a mesh, and the split that would even it out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from rich.console import RenderableType
from rich.table import Table

from ...errors import ShardingError
from ...shown import Shown
from ..experts.placement import balance
from ..sharding.report import show_spec
from ..sharding.rules import spec_entries

# A device is hot when it has this many times the mean load, unless a threshold is given.
HOT_OVER_MEAN = 1.25


@dataclass(frozen=True)
class ShardingAdvice(Shown):
    """The split that evens out a measured load.

    Attributes:
        spec: How to split (rows, columns), that is (batch, hidden), over the mesh axes.
        hotspots: Devices of the grid that are over the threshold now.
        imbalance: Busiest device over the mean for each candidate; "as measured" for the split
            the load was measured with, a model for the others (load inside a block is even).
    """

    spec: PartitionSpec
    hotspots: tuple[tuple[int, ...], ...]
    imbalance: dict[str, float]

    @property
    def imbalance_before(self) -> float:
        """Busiest device over the mean as measured."""
        return self.imbalance["as measured"]

    @property
    def imbalance_after(self) -> float:
        """Busiest device over the mean that the chosen split predicts."""
        return min(self.imbalance.values())

    def to_dict(self) -> dict[str, Any]:
        """The advice as JSON data."""
        return {
            "spec": [list(entry) for entry in spec_entries(self.spec, 2)],
            "hotspots": [list(position) for position in self.hotspots],
            "imbalance": {
                name: {"value": value, "origin": "measured" if name == "as measured" else "model"}
                for name, value in self.imbalance.items()
            },
        }

    def __rich__(self) -> RenderableType:
        """A row for each candidate split."""
        table = Table(title=f"split by ({show_spec(self.spec)}), {len(self.hotspots)} hot spots")
        table.add_column("split")
        table.add_column("busiest / mean", justify="right")
        for name, value in self.imbalance.items():
            table.add_row(name, f"{value:.3f}")
        return table


def detect_hotspots(load: ArrayLike, threshold: float | None = None) -> list[tuple[int, ...]]:
    """Return the index of every device whose load is above `threshold`, in index order.

    The two are compared in the load's own format: 0.8 in float32 is no more than 0.8.

    Args:
        load: Load of each device or expert, of any shape: devices of a mesh, experts by layer, ...
        threshold: In the units of the load; 1.25 times the mean when None.

    Raises:
        ShardingError: The load is empty or holds a value that is not finite.
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
    """Choose how to split a (batch, hidden) computation from the load each device measured.

    `load[i, j]` is the load of the device at (i, j), which holds row block i and column block j.
    Splitting rows over both axes spreads each row block over the devices of its row; splitting
    columns over both spreads each column block over its column; the lower maximum wins.
    For experts use `balance_experts`.

    Args:
        load: A 2-D grid as large as the mesh.
        axis_names: The mesh axes of the grid's two dimensions.
        threshold: Passed to `detect_hotspots`.

    Raises:
        ShardingError: The load is not a 2-D grid of finite numbers, or the names are not two.
    """
    values = _check_load(load)
    names = tuple(axis_names)
    if values.ndim != 2 or len(names) != 2:
        raise ShardingError(
            f"optimize_sharding() got a load of shape {values.shape} and axes {names}; it needs a "
            "2-D grid, one number a device, and two axis names. For experts use balance_experts()."
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
    # min() keeps the first of equals: what is there stays unless something is better.
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
            f"The load of shape {values.shape} is empty or holds values that are not finite; "
            "pass one finite number for each device."
        )
    return values
