"""One device's part of ring attention in XLA: forward and backward over the arriving keys."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from .order import RingLayout, local_positions

HIDDEN = -1e30  # finite, so that a row without any key yet gives no NaN
TINY = 1e-37


@dataclass(frozen=True)
class Sight:
    """Which keys a query attends to, and how scores are scaled and capped."""

    causal: bool
    window: int | None
    scale: float
    chunk: int | None = None
    soft_cap: float | None = None

    def any_visible(self, queries: Array, keys: Array) -> Array:
        """Whether some query of a block may attend to some key; positions ascend in both blocks."""
        visible = jnp.ones((), bool)
        if self.causal:
            visible &= keys[0] <= queries[-1]
        if self.window is not None:
            visible &= queries[0] - keys[-1] < self.window
            visible &= keys[0] - queries[-1] < self.window
        if self.chunk is not None:
            visible &= keys[0] // self.chunk <= queries[-1] // self.chunk
            visible &= queries[0] // self.chunk <= keys[-1] // self.chunk
        return visible

    def visible(self, queries: "Queries", keys: "KeyBlocks") -> Array:
        """Return (b or 1, 1, 1, q, k) booleans."""
        distance = queries.positions[:, None] - keys.positions[None, :]
        visible = jnp.ones_like(distance, bool)
        if self.causal:
            visible &= distance >= 0
        if self.window is not None:
            visible &= jnp.abs(distance) < self.window
        if self.chunk is not None:
            chunks = queries.positions // self.chunk, keys.positions // self.chunk
            visible &= chunks[0][:, None] == chunks[1][None, :]
        visible = visible[None, None, None]
        if queries.segments is None or keys.segments is None:
            return visible
        same = queries.segments[:, :, None] == keys.segments[:, None, :]
        return visible & same[:, None, None]


class Queries(NamedTuple):
    """A block of queries, or (with one more dimension in front) all blocks of a device."""

    q: Array  # (b, q, n, g, d)
    positions: Array  # (q,)
    segments: Array | None  # (b, q)


class KeyBlocks(NamedTuple):
    """A block of keys and values, or all blocks of a device."""

    k: Array  # (b, k, n, d)
    v: Array  # (b, k, n, v)
    positions: Array  # (k,)
    segments: Array | None  # (b, k)


class Softmax(NamedTuple):
    """The softmax-weighted values so far, not yet divided by the sum of the weights."""

    values: Array  # (b, q, n, g, v)
    largest: Array  # (b, n, g, q) the largest score so far
    total: Array  # (b, n, g, q) the sum of weights relative to it

    @classmethod
    def empty(cls, q: Array, width: int) -> "Softmax":
        """Return the sums before the first key, for values of that width, in float32 or better."""
        rows = jnp.zeros_like(q[..., 0], dtype=jnp.promote_types(q.dtype, jnp.float32))
        values = jnp.broadcast_to(rows[..., None], (*rows.shape, width))
        total = jnp.moveaxis(rows, -3, -1)
        return cls(values, jnp.full_like(total, HIDDEN), total)

    @property
    def output(self) -> Array:
        """Return the attention output (b, q, n, g, v)."""
        return self.values / _as_rows(jnp.maximum(self.total, TINY))

    @property
    def log_normalizer(self) -> Array:
        """Return (b, n, g, q), with which the backward pass recomputes the weights."""
        return self.largest + jnp.log(jnp.maximum(self.total, TINY))


def add_block(sight: Sight, softmax: Softmax, queries: Queries, keys: KeyBlocks) -> Softmax:
    """Add a block of keys to the softmax of a block of queries."""
    precise = softmax.values.dtype
    visible = sight.visible(queries, keys)
    scores = jnp.where(visible, _scores(sight, queries, keys, precise)[0], HIDDEN)
    largest = jnp.maximum(softmax.largest, scores.max(-1))
    weights = jnp.where(visible, jnp.exp(scores - largest[..., None]), 0)
    shrink = jnp.exp(softmax.largest - largest)
    values = jnp.einsum(
        "bngqk,bknv->bqngv", weights.astype(keys.v.dtype), keys.v, preferred_element_type=precise
    )
    return Softmax(
        softmax.values * _as_rows(shrink) + values,
        largest,
        softmax.total * shrink + weights.sum(-1),
    )


class OutputGradient(NamedTuple):
    """The inputs of the backward pass for a block of queries."""

    d_out: Array  # (b, q, n, g, v)
    overlap: Array  # (b, n, g, q) the dot product of d_out with the output
    log_normalizer: Array  # (b, n, g, q)


def block_gradients(
    sight: Sight, queries: Queries, keys: KeyBlocks, gradient: OutputGradient
) -> tuple[Array, Array, Array]:
    """Return the contributions of one block of scores to the gradients of q, k and v."""
    precise = gradient.log_normalizer.dtype
    scores, slope = _scores(sight, queries, keys, precise)
    weights = jnp.exp(scores - gradient.log_normalizer[..., None])
    weights = jnp.where(sight.visible(queries, keys), weights, 0)
    d_out = gradient.d_out
    d_weights = jnp.einsum("bqngv,bknv->bngqk", d_out, keys.v, preferred_element_type=precise)
    d_scores = weights * (d_weights - gradient.overlap[..., None]) * sight.scale
    d_scores = (d_scores if slope is None else d_scores * slope).astype(queries.q.dtype)
    weights = weights.astype(d_out.dtype)
    return (
        jnp.einsum("bngqk,bknd->bqngd", d_scores, keys.k, preferred_element_type=precise),
        jnp.einsum("bngqk,bqngd->bknd", d_scores, queries.q, preferred_element_type=precise),
        jnp.einsum("bngqk,bqngv->bknv", weights, d_out, preferred_element_type=precise),
    )


def to_blocks(x: Array, block: int) -> Array:
    """Reshape (b, S, ...) to (S/block, b, block, ...)."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)


def from_blocks(x: Array) -> Array:
    """Undo `to_blocks`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _scores(
    sight: Sight, queries: Queries, keys: KeyBlocks, precise: jnp.dtype
) -> tuple[Array, Array | None]:
    """Return scores (b, n, g, q, k), and the slope of the cap (None without one)."""
    scores = jnp.einsum("bqngd,bknd->bngqk", queries.q, keys.k, preferred_element_type=precise)
    scores = scores * sight.scale
    if sight.soft_cap is None:
        return scores, None
    bent = jnp.tanh(scores / sight.soft_cap)
    return sight.soft_cap * bent, 1 - bent * bent


def _as_rows(per_query: Array) -> Array:
    return jnp.moveaxis(per_query, -1, -3)[..., None]


Tree = TypeVar("Tree")
# q, k, v, segments, the output, and the log normalizers (b, H, S)
Saved: TypeAlias = tuple[Array, Array, Array, Array | None, Array, Array]
KeyGradients: TypeAlias = tuple[Array, Array]  # of k and v, in blocks
Travelling: TypeAlias = tuple[Array, KeyBlocks, KeyGradients]  # d_q stays, the others move on


@dataclass(frozen=True)
class Ring:
    """The devices of the ring and the placement of the sequence on them.

    Attributes:
        axis: The mesh axis.
        shards: Devices along it.
        layout: The order of the sequence.
        piece: Consecutive tokens of a device, which has one or two such pieces.
        block: Queries and keys of a block of scores in XLA; it divides `piece`.
        sight: Which keys a query attends to.
    """

    axis: str
    shards: int
    layout: RingLayout
    piece: int
    block: int
    sight: Sight

    @property
    def here(self) -> Array:
        """The number of this device."""
        return lax.axis_index(self.axis) if self.shards > 1 else jnp.zeros((), jnp.int32)

    def hops(self, length: int) -> int:
        """How often keys move on: all the way round, or as far as a window or chunk extends."""
        sight, hops = self.sight, self.shards - 1
        if not sight.causal or self.layout != "contiguous":
            return hops
        if sight.window is not None:
            hops = min(hops, -(-(sight.window - 1) // length))
        if sight.chunk is not None:
            # A chunk that begins with a device's shard spans no more devices than necessary.
            aligned = sight.chunk % length == 0 or length % sight.chunk == 0
            farthest = sight.chunk - (length if aligned else 1)
            hops = min(hops, max(0, -(-farthest // length)))
        return hops

    def pass_on(self, tree: Tree, hops: int = 1) -> Tree:
        """Send arrays `hops` devices on."""
        if hops % self.shards == 0:
            return tree
        ring = [(device, (device + hops) % self.shards) for device in range(self.shards)]
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, self.axis, ring), tree)

    def split(
        self, q: Array, k: Array, v: Array, segments: Array | None
    ) -> tuple[Queries, KeyBlocks]:
        """Return this device's queries and keys in blocks."""
        positions = local_positions(self.here, q.shape[1], shards=self.shards, layout=self.layout)
        positions = positions.reshape(-1, self.block)
        heads = k.shape[2]
        q = q.reshape(*q.shape[:2], heads, -1, q.shape[-1])
        q, k, v = (to_blocks(x, self.block) for x in (q, k, v))
        segments = None if segments is None else to_blocks(segments, self.block)
        return Queries(q, positions, segments), KeyBlocks(k, v, positions, segments)


def _keep_together(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a block together; jax would otherwise hoist its scores out of the loops, all at once."""
    return jax.checkpoint(function, prevent_cse=False, static_argnums=0)


def forward(
    q: Array, k: Array, v: Array, segments: Array | None, *, ring: Ring
) -> tuple[Array, Array]:
    """Return this device's output (b, S, H, v), and the log normalizers of its rows (b, H, S)."""
    queries, keys = ring.split(q, k, v, segments)

    def see(softmax: Softmax, keys: KeyBlocks) -> Softmax:
        def query_block(_: None, block: tuple[Queries, Softmax]) -> tuple[None, Softmax]:
            queries, softmax = block

            def key_block(softmax: Softmax, keys: KeyBlocks) -> tuple[Softmax, None]:
                softmax = lax.cond(
                    ring.sight.any_visible(queries.positions, keys.positions),
                    lambda: _keep_together(add_block)(ring.sight, softmax, queries, keys),
                    lambda: softmax,
                )
                return softmax, None

            return None, lax.scan(key_block, softmax, keys)[0]

        return lax.scan(query_block, None, (queries, softmax))[1]

    def hop(carry: tuple[Softmax, KeyBlocks], _: None) -> tuple[tuple[Softmax, KeyBlocks], None]:
        softmax, keys = carry
        # Sent before they are used here, so that the transfer overlaps with the computation.
        coming = ring.pass_on(keys)
        return (see(softmax, keys), coming), None

    start = (Softmax.empty(queries.q, v.shape[-1]), keys)
    hops = ring.hops(q.shape[1])
    (softmax, keys), _ = lax.scan(hop, start, length=hops) if hops else (start, None)
    softmax = see(softmax, keys)
    out = from_blocks(softmax.output).reshape(*q.shape[:3], -1).astype(q.dtype)
    rows = jnp.moveaxis(softmax.log_normalizer, 0, -2)  # (b, n, g, blocks, q)
    return out, rows.reshape(q.shape[0], q.shape[2], q.shape[1])


def backward(saved: Saved, d_out: Array, *, ring: Ring) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v; those of k and v move with the keys and end at home."""
    q, k, v, segments, out, log_normalizer = saved
    queries, keys = ring.split(q, k, v, segments)
    precise = log_normalizer.dtype
    overlap = (d_out.astype(precise) * out.astype(precise)).sum(-1)
    by_head = (q.shape[0], *queries.q.shape[3:5])
    gradient = OutputGradient(
        to_blocks(d_out, ring.block).reshape(*queries.q.shape[:-1], -1),
        jnp.moveaxis(to_blocks(overlap, ring.block).reshape(queries.q.shape[:-1]), 2, -1),
        jnp.moveaxis(log_normalizer.reshape(*by_head, -1, ring.block), -2, 0),
    )

    def see(d_q: Array, keys: KeyBlocks, d_keys: KeyGradients) -> tuple[Array, KeyGradients]:
        def key_block(
            d_q: Array, block: tuple[KeyBlocks, KeyGradients]
        ) -> tuple[Array, KeyGradients]:
            keys, d_keys = block

            def query_block(
                d_keys: KeyGradients, block: tuple[Queries, OutputGradient, Array]
            ) -> tuple[KeyGradients, Array]:
                queries, gradient, d_q = block

                def add() -> tuple[KeyGradients, Array]:
                    more_q, more_k, more_v = _keep_together(block_gradients)(
                        ring.sight, queries, keys, gradient
                    )
                    return (d_keys[0] + more_k, d_keys[1] + more_v), d_q + more_q

                return lax.cond(
                    ring.sight.any_visible(queries.positions, keys.positions),
                    add,
                    lambda: (d_keys, d_q),
                )

            d_keys, d_q = lax.scan(query_block, d_keys, (queries, gradient, d_q))
            return d_q, d_keys

        return lax.scan(key_block, d_q, (keys, d_keys))

    def hop(carry: Travelling, _: None) -> tuple[Travelling, None]:
        d_q, keys, d_keys = carry
        coming = ring.pass_on(keys)
        d_q, d_keys = see(d_q, keys, d_keys)
        return (d_q, coming, ring.pass_on(d_keys)), None

    hops = ring.hops(q.shape[1])
    d_q = jnp.zeros_like(queries.q, dtype=precise)
    d_keys = (jnp.zeros_like(keys.k, dtype=precise), jnp.zeros_like(keys.v, dtype=precise))
    if hops:
        (d_q, keys, d_keys), _ = lax.scan(hop, (d_q, keys, d_keys), length=hops)
    d_q, d_keys = see(d_q, keys, d_keys)
    d_k, d_v = ring.pass_on(d_keys, -hops)
    return (
        from_blocks(d_q).reshape(q.shape).astype(q.dtype),
        from_blocks(d_k).astype(k.dtype),
        from_blocks(d_v).astype(v.dtype),
    )
