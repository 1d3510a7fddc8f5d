"""Balance experts over devices from their measured load, moving as few of them as possible."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import ArrayLike
from rich.console import RenderableType
from rich.table import Table

from ...errors import ShardingError
from ...kernels.partition.sharded_call import sharded_call
from ...plain_data import JsonObject
from ...shown import Shown
from ..mesh.mesh import axis_sizes
from ..sharding.rules import spec_entries


@dataclass(frozen=True)
class ExpertPlacement(Shown):
    """Which expert is at which position; equal runs of positions belong to one device each.

    Attributes:
        order: `order[position]` is the expert (numbered as in `load`) that moves to `position`.
        num_devices: Devices along the expert axis.
        load_before: Load of each device now.
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
        """Load of the busiest device over the mean, as measured; 1 is perfect."""
        return balance(self.load_before)

    @property
    def imbalance_after(self) -> float:
        """Load of the busiest device over the mean, predicted with equal costs per token."""
        return balance(self.load_after)

    def to_dict(self) -> JsonObject:
        """Return the placement as JSON data."""
        return {
            "order": list(self.order),
            "num_devices": self.num_devices,
            "moved": list(self.moved),
            "imbalance_before": {"value": self.imbalance_before, "origin": "measured"},
            "imbalance_after": {"value": self.imbalance_after, "origin": "model"},
        }

    def __rich__(self) -> RenderableType:
        """Return a table with a row per device."""
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
    """Return the largest load over the mean; 1 for an even load and for no load."""
    mean = float(np.mean(load))
    return float(np.max(load)) / mean if mean else 1.0


def balance_experts(
    load: ArrayLike, num_devices: int, *, max_moved: int | None = None
) -> ExpertPlacement:
    """Assign experts to devices so that the busiest device has as little load as possible.

    Experts of the busiest device are exchanged for lighter ones elsewhere, best exchange first,
    until none helps. Each exchange moves two experts, and devices keep equally many.

    Args:
        load: Tokens (or seconds) of each expert, in their current order.
        num_devices: Devices along the expert axis.
        max_moved: At most this many experts change device.

    Raises:
        ShardingError: The load is not one non-negative number per expert, or does not divide.
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
    """Return the exchange with the busiest device that gives the lowest maximum of the pair."""
    totals = loads[held].sum(axis=1)
    busiest = int(totals.argmax())
    # change[i, d, j]: load that leaves the busiest device when its i-th expert is exchanged for the
    # j-th expert of device d.
    change = loads[held[busiest]][:, None, None] - loads[held][None, :, :]
    worst = np.maximum(totals[busiest] - change, totals[None, :, None] + change)
    worst[:, busiest, :] = np.inf
    own, other, theirs = np.unravel_index(int(worst.argmin()), worst.shape)
    # The margin keeps rounding from exchanging equal loads forever.
    if worst[own, other, theirs] >= totals[busiest] * (1 - 1e-9):
        return None
    return (busiest, int(own)), (int(other), int(theirs))


def _moved(held: np.ndarray, homes: np.ndarray) -> int:
    each = homes.shape[1]
    return int((held // each != np.arange(len(held))[:, None]).sum())


def _settle(held: np.ndarray) -> np.ndarray:
    """Put experts that stayed on their device back at their position."""
    each = held.shape[1]
    settled = np.full_like(held, -1)
    for device, experts in enumerate(held):
        stay = [expert for expert in experts if expert // each == device]
        for expert in stay:
            settled[device, expert % each] = expert
        settled[device, settled[device] == -1] = [
            expert for expert in experts if expert not in stay
        ]
    return settled


@dataclass(frozen=True)
class Round:
    """Sends that can happen at once: each device sends and receives at most one expert.

    Attributes:
        pairs: (from, to) device numbers along the expert axes.
        send: For each device the slot it sends from; 0 for one that sends nothing.
        fill: For each device the slot it fills; -1 for one that receives nothing.
    """

    pairs: tuple[tuple[int, int], ...]
    send: tuple[int, ...]
    fill: tuple[int, ...]


def reorder_experts(value: Any, order: Sequence[int], dimension: int) -> Any:
    """Return `value` with `order[position]` at `position` along a dimension, sharded as before."""
    if not isinstance(value, jax.Array):
        return np.take(value, np.asarray(order), axis=dimension)
    sharding = value.sharding
    if not isinstance(sharding, NamedSharding):
        return jnp.take(value, np.asarray(order), axis=dimension)
    return _reordering(sharding, tuple(order), dimension)(value)


@lru_cache(maxsize=64)
def _reordering(sharding: NamedSharding, order: tuple[int, ...], dimension: int) -> Any:
    """Return the compiled move, which parameters and moments of one shape share."""
    index = np.asarray(order)
    axes = spec_entries(sharding.spec, dimension + 1)[dimension]
    if not axes:
        take = partial(jnp.take, indices=index, axis=dimension)
        return jax.jit(take, out_shardings=sharding)
    sizes = axis_sizes(sharding.mesh)
    devices = math.prod(sizes[axis] for axis in axes)
    spec = PartitionSpec(*[None] * dimension, axes)
    exchange = sharded_call(
        partial(_exchange, order=index, devices=devices, axes=axes, dimension=dimension),
        sharding.mesh,
        in_specs=spec,
        out_specs=spec,
        axes=axes,
        checks_varying=True,
    )
    return jax.jit(exchange, out_shardings=sharding)


def plan_rounds(order: Sequence[int], devices: int) -> list[Round]:
    """Pack the experts that change device into rounds, first fit."""
    each = len(order) // devices
    rounds: list[dict[int, tuple[int, int, int]]] = []  # by sender: (receiver, from, to)
    for position, expert in enumerate(int(expert) for expert in order):
        sender, receiver = expert // each, position // each
        if sender == receiver:
            continue
        move = (receiver, expert % each, position % each)
        for sends in rounds:
            if sender not in sends and all(receiver != other for other, _, _ in sends.values()):
                sends[sender] = move
                break
        else:
            rounds.append({sender: move})
    return [_as_round(sends, devices) for sends in rounds]


def _as_round(moves: dict[int, tuple[int, int, int]], devices: int) -> Round:
    send, fill = [0] * devices, [-1] * devices
    for sender, (receiver, source, target) in moves.items():
        send[sender], fill[receiver] = source, target
    pairs = tuple((sender, receiver) for sender, (receiver, _, _) in moves.items())
    return Round(pairs, tuple(send), tuple(fill))


def _exchange(
    block: jax.Array, *, order: np.ndarray, devices: int, axes: tuple[str, ...], dimension: int
) -> jax.Array:
    """Move one device's experts: those that stay, then send and receive round by round."""
    each = len(order) // devices
    me = lax.axis_index(axes)
    # A slot whose expert comes from elsewhere has any expert until its round fills it.
    slots = jnp.asarray((order % each).reshape(devices, each))[me]
    result = jnp.take(block, slots, axis=dimension)
    here = jnp.arange(each).reshape([-1 if axis == dimension else 1 for axis in range(block.ndim)])
    for step in plan_rounds(order.tolist(), devices):
        sent = lax.dynamic_index_in_dim(block, jnp.asarray(step.send)[me], dimension)
        received = lax.ppermute(sent, axes, step.pairs)
        result = jnp.where(here == jnp.asarray(step.fill)[me], received, result)
    return result
