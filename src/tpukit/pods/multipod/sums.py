"""Sums over a (dcn, ici) mesh, written per device; call them inside `shard_map`."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...annotations import PyTree
from ..spelling import SpelledEnum


class PodTopology(SpelledEnum):
    """The pattern in which pods exchange data.

    Attributes:
        RING: Each pod sends to its neighbour: little data at once, as many rounds as pods.
        TREE: Pairs, then pairs of pairs: few rounds, and distant regions exchange once.
        MESH: All pods with all, scheduled by the runtime.
    """

    RING = "ring"
    TREE = "tree"
    MESH = "mesh"

    Ring = RING
    Tree = TREE
    Mesh = MESH


class AllReduceStrategy(SpelledEnum):
    """How gradients of all devices are added up.

    Attributes:
        FLAT: One sum over all devices, scheduled by the compiler.
        RING: One ring through all devices, pod after pod.
        HIERARCHICAL: Reduce-scatter within a pod (ICI), sum between pods (DCN, by the topology),
            all-gather within a pod. Each byte crosses between pods once.
        LOCAL_STEPS: Sum only within a pod; pods are averaged after many steps (DiLoCo, arXiv
            2311.08105).
    """

    FLAT = "flat"
    RING = "ring"
    HIERARCHICAL = "hierarchical"
    LOCAL_STEPS = "local_steps"

    FlatAllReduce = FLAT
    RingAllReduce = RING
    HierarchicalAllReduce = HIERARCHICAL
    LocalSteps = LOCAL_STEPS
    DiLoCo = LOCAL_STEPS


def neighbourly_order(zones: Sequence[str]) -> tuple[int, ...]:
    """Return an order of pods in which those of one zone and of one region are neighbours.

    A ring in this order crosses between regions as rarely as possible, and a tree pairs pods within
    a region first.
    """
    regions = [zone.rpartition("-")[0] for zone in zones]
    return tuple(sorted(range(len(zones)), key=lambda pod: (regions[pod], zones[pod], pod)))


BLOCK = 256
"""Number of values that share a scale."""


class RoundingResiduals(NamedTuple):
    """Accumulated rounding errors on one device.

    Attributes:
        sent: Errors of the values that it sends.
        summed: Errors of the part of the sum that it computes.
    """

    sent: jax.Array
    summed: jax.Array

    @classmethod
    def zeros(cls, size: int, pods: int) -> "RoundingResiduals":
        """Return zeros for a shard of `size` values."""
        return cls(jnp.zeros(size, jnp.float32), jnp.zeros(size // pods, jnp.float32))


def compressed_sum(
    piece: jax.Array, residuals: RoundingResiduals, pods: int
) -> tuple[jax.Array, RoundingResiduals]:
    """Return the rounded sum of `piece` over pods, and the new rounding errors.

    Args:
        piece: One-dimensional shard; its length is a multiple of `pods` times `BLOCK`.
        residuals: Rounding errors of the previous step.
        pods: Size of the axis "dcn".
    """
    wanted = piece.astype(jnp.float32) + residuals.sent
    codes, scales = _round(wanted)
    lost = wanted - _restore(codes, scales)
    # all_to_all sends row i to pod i, and receives row i from pod i.
    codes = lax.all_to_all(codes.reshape(pods, -1, BLOCK), DCN, 0, 0)
    scales = lax.all_to_all(scales.reshape(pods, -1), DCN, 0, 0)
    total = (codes * scales[..., None]).sum(0).reshape(-1) + residuals.summed
    codes, scales = _round(total)
    lost_of_sum = total - _restore(codes, scales)
    codes = lax.all_gather(codes, DCN, tiled=True)
    scales = lax.all_gather(scales, DCN, tiled=True)
    return _restore(codes, scales).astype(piece.dtype), RoundingResiduals(lost, lost_of_sum)


def _round(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return int8 codes of shape (blocks, BLOCK), and one scale per block."""
    blocks = values.reshape(-1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=1) / 127
    safe = jnp.where(scales > 0, scales, 1.0)
    return jnp.round(blocks / safe[:, None]).astype(jnp.int8), scales


def _restore(codes: jax.Array, scales: jax.Array) -> jax.Array:
    return (codes * scales[:, None]).reshape(-1)


@dataclass(frozen=True)
class LeafPacking:
    """Positions of a tree's leaves in vectors, one vector per dtype.

    Attributes:
        members: Leaf indices of each dtype.
        multiple: Vectors are padded with zeros to a multiple of this.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    members: dict[str, tuple[int, ...]]
    multiple: int

    @classmethod
    def of(cls, tree: PyTree, *, multiple: int) -> "LeafPacking":
        """Make the packing of trees with this structure."""
        leaves, structure = jax.tree.flatten(tree)
        members: dict[str, tuple[int, ...]] = {}
        for number, leaf in enumerate(leaves):
            name = str(jnp.result_type(leaf))
            members[name] = (*members.get(name, ()), number)
        shapes = tuple(tuple(jnp.shape(leaf)) for leaf in leaves)
        return cls(structure, shapes, members, multiple)

    def size(self, name: str) -> int:
        """Return the length of the vector of a dtype."""
        size = sum(prod(self.shapes[number]) for number in self.members[name])
        return -(-size // self.multiple) * self.multiple

    @property
    def bytes(self) -> int:
        """Total size of all vectors."""
        return sum(self.size(name) * jnp.dtype(name).itemsize for name in self.members)

    def pack(self, tree: PyTree) -> dict[str, jax.Array]:
        """Return a tree's vectors."""
        leaves = jax.tree.leaves(tree)
        return {
            name: _joined([leaves[number] for number in numbers], self.size(name))
            for name, numbers in self.members.items()
        }

    def unpack(self, vectors: dict[str, jax.Array]) -> PyTree:
        """Return the tree of these vectors."""
        leaves: list[Any] = [None] * len(self.shapes)
        for name, numbers in self.members.items():
            at = 0
            for number in numbers:
                size = prod(self.shapes[number])
                leaves[number] = vectors[name][at : at + size].reshape(self.shapes[number])
                at += size
        return jax.tree.unflatten(self.structure, leaves)


def _joined(leaves: Sequence[jax.Array], size: int) -> jax.Array:
    joined = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
    return jnp.pad(joined, (0, size - joined.size))


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
    """Return the sum of all devices' `values`, on every device.

    Args:
        values: One-dimensional; its length is a multiple of the number of devices.
        strategy: How to add up.
        topology: Pattern between pods, if the strategy has such a stage.
        pods: Size of the axis "dcn".
        chips: Size of the axis "ici".
        order: Order of the pods in a ring or tree.
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
    """Return the sum over pods of the shards on the same chip of each pod."""
    match topology:
        case PodTopology.MESH:
            return lax.psum(piece, DCN)
        case PodTopology.RING:
            return ring_sum(piece, DCN, order)
        case PodTopology.TREE:
            return tree_sum(piece, DCN, order)


def ring_sum(values: jax.Array, axis: str | tuple[str, ...], order: Sequence[int]) -> jax.Array:
    """Return the sum along an axis, by a ring through its members in this order.

    Reduce-scatter and all-gather take n - 1 rounds each. Every member sends 2 (n - 1) / n of its
    data, which is the minimum.
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

    # Unrolled, so that the compiler can overlap the messages.
    for turn in range(members - 1):
        chunks = reduce(turn, chunks)
    for turn in range(members - 1):
        chunks = gather(turn, chunks)
    return chunks.reshape(-1)[:size]


def tree_sum(values: jax.Array, axis: str, order: Sequence[int]) -> jax.Array:
    """Return the sum along an axis, by a binary tree over its members in this order."""
    members = len(order)
    place = jnp.argsort(jnp.asarray(order))[lax.axis_index(axis)]
    spans = [2**power for power in range((members - 1).bit_length())]
    for span in spans:  # reduce towards the first member
        pairs = [(at + span, at) for at in range(0, members - span, 2 * span)]
        sent = lax.ppermute(values, axis, [(order[far], order[near]) for far, near in pairs])
        values = values + sent  # members without a sender receive zeros
    for span in reversed(spans):  # broadcast back
        pairs = [(at, at + span) for at in range(0, members - span, 2 * span)]
        sent = lax.ppermute(values, axis, [(order[near], order[far]) for near, far in pairs])
        receives = (place % (2 * span) == span) & (place < members)
        values = jnp.where(receives, sent, values)
    return values
