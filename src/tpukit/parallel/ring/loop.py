"""One device's part of ring attention in XLA: forward and backward over the arriving keys."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...kernels.ops.flash_attention.blockwise import (
    KeyBlocks,
    OutputGradient,
    Queries,
    Softmax,
    add_block,
    block_gradients,
    from_blocks,
    to_blocks,
)
from ...kernels.ops.flash_attention.spec import AttentionSpec
from .order import RingLayout, local_positions

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
        spec: The attention, without arrays.
    """

    axis: str
    shards: int
    layout: RingLayout
    piece: int
    block: int
    spec: AttentionSpec

    @property
    def here(self) -> Array:
        """The number of this device."""
        return lax.axis_index(self.axis) if self.shards > 1 else jnp.zeros((), jnp.int32)

    def hops(self, length: int) -> int:
        """How often keys move on: all the way round, or as far as a window or chunk extends."""
        spec, hops = self.spec, self.shards - 1
        if not spec.causal or self.layout != "contiguous":
            return hops
        if spec.window is not None:
            hops = min(hops, -(-(spec.window - 1) // length))
        if spec.chunk is not None:
            # A chunk that begins with a device's shard spans no more devices than necessary.
            aligned = spec.chunk % length == 0 or length % spec.chunk == 0
            farthest = spec.chunk - (length if aligned else 1)
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
                    ring.spec.allows_any(queries.positions, keys.positions),
                    lambda: _keep_together(add_block)(ring.spec, softmax, queries, keys),
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
                        ring.spec, queries, keys, gradient
                    )
                    return (d_keys[0] + more_k, d_keys[1] + more_v), d_q + more_q

                return lax.cond(
                    ring.spec.allows_any(queries.positions, keys.positions),
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
