"""Ring attention by the TPU's flash kernel, between pieces of the sequence.

A piece of queries attends to all of an earlier piece of keys, to its own up to the diagonal and to
a later one not at all, so the kernel needs no positions. Results are joined by the log-sum-exp of
their rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...annotations import PyTree
from ...kernels.ops.flash_attention import pallas_tpu
from ...kernels.ops.flash_attention.problem import Residuals
from ...kernels.ops.flash_attention.spec import SegmentIds
from .loop import Ring, Saved
from .order import pieces_a_shard

_NOTHING = -1e30  # the log-sum-exp of no key: below that of any row, and finite


class _Keys(NamedTuple):
    """What moves around the ring: pieces (piece, b, k, n, d), and their segments (piece, b, k)."""

    k: Array
    v: Array
    segments: Array | None


@dataclass(frozen=True)
class _Pair:
    """A piece of this device's queries and a piece of the keys that are here.

    Where `visible` is False the pair does not count. With chunks, when most devices have no visible
    pair in a hop, it is skipped; else it is computed like those of other devices, and dropped.
    """

    queries: int | Array
    keys: int | Array
    causal: bool = False
    visible: Array | None = None


def forward(
    q: Array, k: Array, v: Array, segments: Array | None, *, ring: Ring, interpret: bool = False
) -> tuple[Array, Array]:
    """Return this device's output, and the log-sum-exp of its rows (b, H, S)."""
    pieces = _pieces(ring)
    queries, own_segments = _split(q, pieces), _split(segments, pieces)
    keys = _Keys(_split(k, pieces), _split(v, pieces), own_segments)

    def see(so_far: tuple[Array, Array], keys: _Keys, pairs: list[_Pair]) -> tuple[Array, Array]:
        out, lse = so_far
        for pair in pairs:

            def attend(pair: _Pair = pair) -> tuple[Array, Array]:
                return pallas_tpu.with_sums(
                    queries[pair.queries],
                    keys.k[pair.keys],
                    keys.v[pair.keys],
                    _ids(pair, own_segments, keys.segments),
                    **_options(ring, pair, interpret),
                )

            more, sums = _where_visible(ring, pair, attend, (0, _NOTHING))
            before = lse[pair.queries]
            after = jnp.logaddexp(before, sums)
            joined = out[pair.queries] * _rows(before - after) + more * _rows(sums - after)
            out, lse = out.at[pair.queries].set(joined), lse.at[pair.queries].set(after)
        return out, lse

    empty = jnp.zeros((*queries.shape[:-1], v.shape[-1]), jnp.float32)
    so_far = (empty, jnp.full_like(jnp.moveaxis(empty[..., 0], -1, -2), _NOTHING))
    coming = ring.pass_on(keys)
    so_far = see(so_far, keys, _own_pairs(ring))
    hops, here = ring.hops(q.shape[1]), ring.here

    def hop(carry: tuple[Any, _Keys], number: Array) -> tuple[tuple[Any, _Keys], None]:
        so_far, keys = carry
        # Sent before they are used here, so that the transfer overlaps with the computation.
        coming = ring.pass_on(keys)
        return (see(so_far, keys, _pairs_after(ring, here, number)), coming), None

    if hops > 1:
        (so_far, coming), _ = lax.scan(hop, (so_far, coming), jnp.arange(1, hops))
    if hops:
        so_far = see(so_far, coming, _pairs_after(ring, here, hops))
    out, lse = so_far
    return _join(out).astype(q.dtype), _join(lse, axis=-1)


def backward(
    saved: Saved, d_out: Array, *, ring: Ring, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v; those of k and v move with the keys and end at home."""
    q, k, v, segments, out, lse = saved
    pieces = _pieces(ring)
    queries, own_segments = _split(q, pieces), _split(segments, pieces)
    results, d_results = _split(out, pieces), _split(d_out, pieces)
    sums = _split(lse, pieces, axis=-1)
    keys = _Keys(_split(k, pieces), _split(v, pieces), own_segments)

    def see(
        d_q: Array, d_keys: tuple[Array, Array], keys: _Keys, pairs: list[_Pair]
    ) -> tuple[Array, tuple[Array, Array]]:
        d_k, d_v = d_keys
        for pair in pairs:
            residuals = Residuals(
                queries[pair.queries],
                keys.k[pair.keys],
                keys.v[pair.keys],
                _ids(pair, own_segments, keys.segments),
                rope=None,
                dense_mask=None,
                sinks=None,
                out=results[pair.queries],
                lse=sums[pair.queries],
            )

            def pull(pair: _Pair = pair, residuals: Residuals = residuals) -> tuple[Array, ...]:
                options = _options(ring, pair, interpret)
                return pallas_tpu.backward(residuals, d_results[pair.queries], **options)[:3]

            more = _where_visible(ring, pair, pull, (0, 0, 0))
            d_q = d_q.at[pair.queries].add(more[0].astype(jnp.float32))
            d_k = d_k.at[pair.keys].add(more[1].astype(jnp.float32))
            d_v = d_v.at[pair.keys].add(more[2].astype(jnp.float32))
        return d_q, (d_k, d_v)

    none = (jnp.zeros(keys.k.shape, jnp.float32), jnp.zeros(keys.v.shape, jnp.float32))
    coming = ring.pass_on(keys)
    d_q, d_keys = see(jnp.zeros(queries.shape, jnp.float32), none, keys, _own_pairs(ring))
    hops, here = ring.hops(q.shape[1]), ring.here

    def hop(carry: PyTree, number: Array) -> tuple[Any, None]:
        d_q, d_keys, keys = carry
        # Neither waits for the computation: the sums of the last hop are added after it.
        coming, arriving = ring.pass_on(keys), ring.pass_on(d_keys)
        d_q, added = see(d_q, none, keys, _pairs_after(ring, here, number))
        return (d_q, jax.tree.map(jnp.add, arriving, added), coming), None

    if hops:
        (d_q, d_keys, _), _ = lax.scan(hop, (d_q, d_keys, coming), jnp.arange(1, hops + 1))
    d_k, d_v = ring.pass_on(d_keys, -hops)
    return _join(d_q).astype(q.dtype), _join(d_k).astype(k.dtype), _join(d_v).astype(v.dtype)


def _own_pairs(ring: Ring) -> list[_Pair]:
    """Return the pairs of this device's queries with its own keys."""
    if _pieces(ring) == 1:
        return [_Pair(0, 0, causal=ring.spec.causal)]
    across = _Pair(1, 0, visible=_in_one_chunk(ring, _late(ring, ring.here), ring.here))
    return [_Pair(0, 0, causal=True), _Pair(1, 1, causal=True), across]


def _pairs_after(ring: Ring, here: Array, hops: int | Array) -> list[_Pair]:
    """Return the pairs of this device's queries with keys that have come that many hops.

    In the zigzag layout the later piece attends to the earlier one of every other device. In
    addition, both attend to the earlier piece of a device before this one, or the later piece to
    both of a device after it: two pairs on every device in every hop.
    """
    there = (here - hops) % ring.shards
    earlier = there < here
    if _pieces(ring) == 1:
        if not ring.spec.causal:
            return [_Pair(0, 0)]
        in_chunk = _in_one_chunk(ring, here, there)
        return [_Pair(0, 0, visible=earlier if in_chunk is None else earlier & in_chunk)]
    other = jnp.where(earlier, 0, 1)
    ours = jnp.where(earlier, here, _late(ring, here))
    theirs = jnp.where(earlier, there, _late(ring, there))
    return [
        _Pair(1, 0, visible=_in_one_chunk(ring, _late(ring, here), there)),
        _Pair(other, other, visible=_in_one_chunk(ring, ours, theirs)),
    ]


def _late(ring: Ring, device: Array) -> Array:
    """Return the number of a device's later piece, in the zigzag layout."""
    return 2 * ring.shards - 1 - device


def _in_one_chunk(ring: Ring, piece: Array, other: Array) -> Array | None:
    """Whether two pieces are in one chunk; None without chunks."""
    if ring.spec.chunk is None:
        return None
    pieces = ring.spec.chunk // ring.piece
    return piece // pieces == other // pieces


def _where_visible(
    ring: Ring, pair: _Pair, compute: Callable[[], tuple[Array, ...]], nothing: tuple[float, ...]
) -> tuple[Array, ...]:
    """Return the contribution of a pair, or arrays of `nothing` where it is not visible."""
    if pair.visible is None:
        return compute()
    if ring.spec.chunk is not None:

        def skip() -> tuple[Array, ...]:
            shapes = zip(jax.eval_shape(compute), nothing, strict=True)
            return tuple(jnp.full(x.shape, value, x.dtype) for x, value in shapes)

        return lax.cond(pair.visible, compute, skip)
    # Weights of keys that no query counted may be infinite, so they are selected, not multiplied.
    pairs = zip(compute(), nothing, strict=True)
    return tuple(jnp.where(pair.visible, x, value) for x, value in pairs)


def _pieces(ring: Ring) -> int:
    """Return the pieces; without a causal mask the order does not matter to the kernel."""
    return pieces_a_shard(ring.layout) if ring.spec.causal else 1


def _options(ring: Ring, pair: _Pair, interpret: bool) -> dict[str, Any]:
    between_pieces = replace(ring.spec, causal=pair.causal, chunk=None)
    return {**between_pieces.options, "interpret": interpret}


def _ids(pair: _Pair, own: Array | None, met: Array | None) -> SegmentIds | None:
    if own is None or met is None:
        return None
    return SegmentIds(own[pair.queries], met[pair.keys])


def _split(x: Array | None, pieces: int, axis: int = 1) -> Any:
    """Split the sequence into pieces, which become the first axis."""
    return None if x is None else jnp.stack(jnp.split(x, pieces, axis))


def _join(x: Array, axis: int = 1) -> Array:
    """Undo `_split`."""
    return jnp.concatenate(list(x), axis)


def _rows(log_weight: Array) -> Array:
    """Reshape weights (b, H, q) for rows (b, q, H, d)."""
    return jnp.exp(jnp.moveaxis(log_weight, 1, 2))[..., None]
