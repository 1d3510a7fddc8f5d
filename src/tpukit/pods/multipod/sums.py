"""Sums over a mesh of (dcn, ici), each written out for one device; run them in `shard_map`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .strategy import AllReduceStrategy, PodTopology

DCN, ICI = "dcn", "ici"


def sum_over_devices(
    values: jax.Array,
    *,
    strategy: AllReduceStrategy,
    topology: PodTopology,
    pods: int,
    chips: int,
    order: Sequence[int],
) -> jax.Array:
    """Return the sum of every device's `values`, on each of them.

    Args:
        values: One dimension, a multiple of the number of devices.
        strategy: The way to add up.
        topology: Between pods, where the strategy has a stage for that.
        pods: Size of the axis "dcn".
        chips: Size of the axis "ici".
        order: Pods in the order of a ring or tree.
    """
    match strategy:
        case AllReduceStrategy.FLAT:
            return lax.psum(values, (DCN, ICI))
        case AllReduceStrategy.RING:
            through = [pod * chips + chip for pod in order for chip in range(chips)]
            return ring_sum(values, (DCN, ICI), through)
        case AllReduceStrategy.HIERARCHICAL | AllReduceStrategy.LOCAL_STEPS:
            piece = lax.psum_scatter(values, ICI, tiled=True)
            piece = sum_between_pods(piece, topology, order)
            return lax.all_gather(piece, ICI, tiled=True)


def sum_between_pods(piece: jax.Array, topology: PodTopology, order: Sequence[int]) -> jax.Array:
    """Return the sum over pods of what the same chip of each of them holds."""
    match topology:
        case PodTopology.MESH:
            return lax.psum(piece, DCN)
        case PodTopology.RING:
            return ring_sum(piece, DCN, order)
        case PodTopology.TREE:
            return tree_sum(piece, DCN, order)


def ring_sum(values: jax.Array, axis: str | tuple[str, ...], order: Sequence[int]) -> jax.Array:
    """Return the sum along an axis by a ring through its members in this order.

    Reduce-scatter and all-gather, each in one round less than there are members: every member
    sends 2 (n - 1) / n of its data, which no algorithm can do with less.
    """
    members = len(order)
    if members == 1:
        return values
    size = values.size
    chunks = jnp.pad(values, (0, -size % members)).reshape(members, -1)
    onward = [(order[at], order[(at + 1) % members]) for at in range(members)]
    place = jnp.argsort(jnp.asarray(order))[lax.axis_index(axis)]

    def reduce(turn: int, chunks: jax.Array) -> jax.Array:
        sent = lax.dynamic_index_in_dim(chunks, (place - turn) % members, keepdims=False)
        got = lax.ppermute(sent, axis, onward)
        return chunks.at[(place - turn - 1) % members].add(got)

    def gather(turn: int, chunks: jax.Array) -> jax.Array:
        sent = lax.dynamic_index_in_dim(chunks, (place + 1 - turn) % members, keepdims=False)
        got = lax.ppermute(sent, axis, onward)
        return chunks.at[(place - turn) % members].set(got)

    # Few rounds, each a message: written out, so that the compiler can overlap them.
    for turn in range(members - 1):
        chunks = reduce(turn, chunks)
    for turn in range(members - 1):
        chunks = gather(turn, chunks)
    return chunks.reshape(-1)[:size]


def tree_sum(values: jax.Array, axis: str, order: Sequence[int]) -> jax.Array:
    """Return the sum along an axis by a binary tree over its members in this order."""
    members = len(order)
    place = jnp.argsort(jnp.asarray(order))[lax.axis_index(axis)]
    spans = [2**power for power in range((members - 1).bit_length())]
    for span in spans:  # towards the first
        pairs = [(at + span, at) for at in range(0, members - span, 2 * span)]
        sent = lax.ppermute(values, axis, [(order[far], order[near]) for far, near in pairs])
        values = values + sent  # who is sent nothing gets zeros
    for span in reversed(spans):  # and back
        pairs = [(at, at + span) for at in range(0, members - span, 2 * span)]
        sent = lax.ppermute(values, axis, [(order[near], order[far]) for near, far in pairs])
        receives = (place % (2 * span) == span) & (place < members)
        values = jnp.where(receives, sent, values)
    return values
