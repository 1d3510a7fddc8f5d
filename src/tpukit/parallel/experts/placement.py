"""Balance experts over devices from their measured load, moving as few of them as possible."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.console import RenderableType
from rich.table import Table

from ...errors import ShardingError
from ...shown import Shown


@dataclass(frozen=True)
class ExpertPlacement(Shown):
    """Which expert is at which position; equal runs of positions belong to one device each.

    Attributes:
        order: `order[position]` is the expert (numbered as in `load`) that moves to `position`.
        num_devices: Devices along the expert axis.
        load_before: Load of each device as things stand.
        load_after: Load of each device after the move, if the load stays as measured.
    """

    order: tuple[int, ...]
    num_devices: int
    load_before: tuple[float, ...]
    load_after: tuple[float, ...]

    @property
    def moved(self) -> tuple[int, ...]:
        """Experts that change device."""
        each = len(self.order) // self.num_devices
        return tuple(
            expert
            for position, expert in enumerate(self.order)
            if position // each != expert // each
        )

    @property
    def imbalance_before(self) -> float:
        """Busiest device over the mean, as measured; 1 is perfect."""
        return balance(self.load_before)

    @property
    def imbalance_after(self) -> float:
        """Busiest device over the mean, as predicted by this model of equal costs a token."""
        return balance(self.load_after)

    def to_dict(self) -> dict[str, Any]:
        """The placement as JSON data."""
        return {
            "order": list(self.order),
            "num_devices": self.num_devices,
            "moved": list(self.moved),
            "imbalance_before": {"value": self.imbalance_before, "origin": "measured"},
            "imbalance_after": {"value": self.imbalance_after, "origin": "model"},
        }

    def __rich__(self) -> RenderableType:
        """A row for each device."""
        table = Table(
            title=f"busiest / mean {self.imbalance_before:.2f} (measured) → "
            f"{self.imbalance_after:.2f} (model)\n{len(self.moved)} experts move"
        )
        for name in ("device", "experts", "load before", "load after"):
            table.add_column(name, justify="left" if name == "experts" else "right")
        each = len(self.order) // self.num_devices
        for device in range(self.num_devices):
            experts = self.order[device * each : (device + 1) * each]
            table.add_row(
                str(device),
                " ".join(map(str, experts)),
                f"{self.load_before[device]:.4g}",
                f"{self.load_after[device]:.4g}",
            )
        return table


def balance(load: Sequence[float]) -> float:
    """Largest over mean; 1 for an even load and for no load at all."""
    mean = float(np.mean(load))
    return float(np.max(load)) / mean if mean else 1.0


def balance_experts(
    load: ArrayLike, num_devices: int, *, max_moved: int | None = None
) -> ExpertPlacement:
    """Assign experts to devices so that the busiest device has as little to do as possible.

    Experts of the busiest device are exchanged for lighter ones elsewhere, best exchange first,
    until none helps: each exchange moves two experts, and devices keep equally many.

    Args:
        load: Tokens (or seconds) each expert got, in the order they stand now.
        num_devices: Devices along the expert axis.
        max_moved: At most this many experts change device.

    Raises:
        ShardingError: The load is not one non-negative number an expert, or does not divide.
    """
    loads = np.asarray(load, dtype=np.float64)
    if loads.ndim != 1 or not loads.size or not np.isfinite(loads).all() or (loads < 0).any():
        raise ShardingError(
            f"balance_experts() got a load of shape {loads.shape}; it needs one finite number "
            "of zero or more for each expert, such as tokens routed."
        )
    if num_devices < 1 or loads.size % num_devices:
        raise ShardingError(
            f"{loads.size} experts do not divide over {num_devices} devices; "
            "use a number of devices that divides the experts."
        )
    homes = np.arange(loads.size).reshape(num_devices, -1)
    held = homes.copy()
    while True:
        exchange = _best_exchange(loads, held)
        if exchange is None:
            break
        tried = held.copy()
        tried[exchange[0]], tried[exchange[1]] = held[exchange[1]], held[exchange[0]]
        if max_moved is not None and _moved(tried, homes) > max_moved:
            break
        held = tried
    return ExpertPlacement(
        order=tuple(int(expert) for expert in _settle(held).reshape(-1)),
        num_devices=num_devices,
        load_before=tuple(loads[homes].sum(axis=1).tolist()),
        load_after=tuple(loads[held].sum(axis=1).tolist()),
    )


def _best_exchange(
    loads: np.ndarray, held: np.ndarray
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The exchange with the busiest device that leaves the lower maximum of the pair."""
    totals = loads[held].sum(axis=1)
    busiest = int(totals.argmax())
    # change[i, d, j]: load that leaves the busiest device when its i-th expert is exchanged for
    # the j-th expert of device d.
    change = loads[held[busiest]][:, None, None] - loads[held][None, :, :]
    worst = np.maximum(totals[busiest] - change, totals[None, :, None] + change)
    worst[:, busiest, :] = np.inf
    own, other, theirs = np.unravel_index(int(worst.argmin()), worst.shape)
    # The margin keeps rounding from trading equal loads forever.
    if worst[own, other, theirs] >= totals[busiest] * (1 - 1e-9):
        return None
    return (busiest, int(own)), (int(other), int(theirs))


def _moved(held: np.ndarray, homes: np.ndarray) -> int:
    each = homes.shape[1]
    return int((held // each != np.arange(len(held))[:, None]).sum())


def _settle(held: np.ndarray) -> np.ndarray:
    """Put experts that stayed on their device back at the position they had."""
    each = held.shape[1]
    settled = np.full_like(held, -1)
    for device, experts in enumerate(held):
        stay = [expert for expert in experts if expert // each == device]
        for expert in stay:
            settled[device, expert % each] = expert
        settled[device, settled[device] == -1] = [one for one in experts if one not in stay]
    return settled
