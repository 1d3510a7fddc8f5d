"""Reorder experts that are spread over devices, sending only those that change device.

A plain gather would do, but the partitioner turns it into a masked all-reduce of the whole array:
more traffic, and sums that turn -0.0 into 0.0. Here each expert is sent once, as it is.
"""

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

from ..mesh.mesh import axis_sizes
from ..sharding.rules import spec_entries


@dataclass(frozen=True)
class Round:
    """Sends that can happen at once: each device sends one expert at most and gets one at most.

    Attributes:
        pairs: (from, to) device numbers along the expert axes.
        send: For each device the slot it sends from; 0 for one that sends nothing.
        fill: For each device the slot it fills; -1 for one that gets nothing.
    """

    pairs: tuple[tuple[int, int], ...]
    send: tuple[int, ...]
    fill: tuple[int, ...]


def reorder_experts(value: Any, order: Sequence[int], dimension: int) -> Any:
    """Return `value` with `order[position]` at `position` along a dimension, sharded as it was."""
    if not isinstance(value, jax.Array):
        return np.take(value, np.asarray(order), axis=dimension)
    sharding = value.sharding
    if not isinstance(sharding, NamedSharding):
        return jnp.take(value, np.asarray(order), axis=dimension)
    return _reordering(sharding, tuple(order), dimension)(value)


@lru_cache(maxsize=64)
def _reordering(sharding: NamedSharding, order: tuple[int, ...], dimension: int) -> Any:
    """The compiled move; parameters and moments of one shape share it."""
    index = np.asarray(order)
    axes = spec_entries(sharding.spec, dimension + 1)[dimension]
    if not axes:
        whole = partial(jnp.take, indices=index, axis=dimension)
        return jax.jit(whole, out_shardings=sharding)
    sizes = axis_sizes(sharding.mesh)
    devices = math.prod(sizes[axis] for axis in axes)
    spec = PartitionSpec(*[None] * dimension, axes)
    exchange = jax.shard_map(
        partial(_exchange, order=index, devices=devices, axes=axes, dimension=dimension),
        mesh=sharding.mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names=set(axes),
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
        for one in rounds:
            if sender not in one and all(receiver != other for other, _, _ in one.values()):
                one[sender] = move
                break
        else:
            rounds.append({sender: move})
    return [_as_round(one, devices) for one in rounds]


def _as_round(moves: dict[int, tuple[int, int, int]], devices: int) -> Round:
    send, fill = [0] * devices, [-1] * devices
    for sender, (receiver, source, target) in moves.items():
        send[sender], fill[receiver] = source, target
    pairs = tuple((sender, receiver) for sender, (receiver, _, _) in moves.items())
    return Round(pairs, tuple(send), tuple(fill))


def _exchange(
    block: jax.Array, *, order: np.ndarray, devices: int, axes: tuple[str, ...], dimension: int
) -> jax.Array:
    """One device's part: settle the experts that stay, then send and receive round by round."""
    each = len(order) // devices
    me = lax.axis_index(axes)
    # A slot whose expert comes from elsewhere holds any expert until its round fills it.
    slots = jnp.asarray((order % each).reshape(devices, each))[me]
    result = jnp.take(block, slots, axis=dimension)
    here = jnp.arange(each).reshape([-1 if axis == dimension else 1 for axis in range(block.ndim)])
    for one in plan_rounds(order.tolist(), devices):
        sent = lax.dynamic_index_in_dim(block, jnp.asarray(one.send)[me], dimension)
        received = lax.ppermute(sent, axes, one.pairs)
        result = jnp.where(here == jnp.asarray(one.fill)[me], received, result)
    return result
