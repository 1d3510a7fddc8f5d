"""Causal attention with a window over a sharded sequence, without a ring.

Each piece of queries attends to its own keys and those at the end of the piece before, which a
neighbour sends. Together they are one short sequence for the TPU's flash kernel.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...kernels.blocks.tiling import round_up
from ...kernels.ops.flash_attention import pallas_tpu
from ...kernels.ops.flash_attention.problem import LANES, Residuals
from ...kernels.ops.flash_attention.spec import SegmentIds
from .loop import Ring, Saved
from .order import pieces_a_shard

# Segments of missing tokens before a piece: numbers that no document has.
_NO_QUERY, _NO_KEY = -(2**31), -(2**31) + 1


def reaches_one_piece(window: int, piece: int) -> bool:
    """Whether no query attends past the piece before its own."""
    return window - 1 <= piece


def forward(
    q: Array, k: Array, v: Array, segments: Array | None, *, ring: Ring, interpret: bool = False
) -> tuple[Array, Array]:
    """Return this device's output, and the log-sum-exp of its rows (b, H, S)."""
    out, lse = pallas_tpu.with_sums(
        *_extended(ring, q, k, v, segments), **_options(ring, interpret)
    )
    behind = _reach(ring, q)
    rows = jnp.moveaxis(lse[:, :, behind:], 1, 2)
    return _together(ring, out[:, behind:]), jnp.moveaxis(_together(ring, rows), 1, 2)


def backward(
    saved: Saved, d_out: Array, *, ring: Ring, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v; those of a neighbour's keys go back to it."""
    q, k, v, segments, out, lse = saved
    behind = _reach(ring, q)
    sums = jnp.moveaxis(_before(behind, _apart(ring, jnp.moveaxis(lse, 1, 2))), 1, 2)
    residuals = Residuals(
        *_extended(ring, q, k, v, segments),
        rope=None,
        dense_mask=None,
        sinks=None,
        out=_before(behind, _apart(ring, out)),
        lse=sums,
    )
    d_result = _before(behind, _apart(ring, d_out))
    d_q, d_k, d_v, *_ = pallas_tpu.backward(residuals, d_result, **_options(ring, interpret))
    _, send_back = jax.vjp(lambda *x: tuple(_with_ends(ring, array, behind) for array in x), k, v)
    return _together(ring, d_q[:, behind:]), *send_back((d_k, d_v))


def _extended(
    ring: Ring, q: Array, k: Array, v: Array, segments: Array | None
) -> tuple[Array, Array, Array, SegmentIds]:
    """Return queries, keys and values with the previous piece's end in front; segments mask it."""
    behind = _reach(ring, q)
    own = jnp.zeros(q.shape[:2], jnp.int32) if segments is None else segments.astype(jnp.int32)
    of_keys = _with_ends(ring, own, behind)
    # The first piece of the sequence, on the first device, has no keys before it.
    first = (jnp.arange(len(of_keys)) < len(q)) & (ring.here == 0)
    of_keys = of_keys.at[:, :behind].set(jnp.where(first[:, None], _NO_KEY, of_keys[:, :behind]))
    return (
        _before(behind, _apart(ring, q)),
        _with_ends(ring, k, behind),
        _with_ends(ring, v, behind),
        SegmentIds(_before(behind, _apart(ring, own), _NO_QUERY), of_keys),
    )


def _with_ends(ring: Ring, x: Array, behind: int) -> Array:
    """Reshape (b, S, ...) to (pieces b, behind + piece, ...), with the end of the piece before."""
    pieces = _apart(ring, x)
    ends = pieces[:, pieces.shape[1] - behind :]
    if pieces_a_shard(ring.layout) == 1:
        return jnp.concatenate([ring.pass_on(ends), pieces], axis=1)
    # Late pieces are in the opposite order; after the early piece of the last device comes its late
    # one.
    early, late = jnp.split(ends, 2)
    at_the_turn = ring.here == ring.shards - 1
    before_late = jnp.where(at_the_turn, early, ring.pass_on(late, -1))
    return jnp.concatenate([jnp.concatenate([ring.pass_on(early), before_late]), pieces], axis=1)


def _reach(ring: Ring, q: Array) -> int:
    """Return the tokens before a piece that its queries may see, in full lanes if possible."""
    assert ring.spec.window is not None
    piece = q.shape[1] // pieces_a_shard(ring.layout)
    return min(round_up(ring.spec.window - 1, LANES), piece)


def _options(ring: Ring, interpret: bool) -> dict[str, Any]:
    return {**ring.spec.options, "interpret": interpret}


def _before(rows: int, x: Array, value: int = 0) -> Array:
    """Prepend that many rows of `value` to each sequence."""
    widths = [(rows if axis == 1 else 0, 0) for axis in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def _apart(ring: Ring, x: Array) -> Array:
    """Reshape (b, S, ...) to (pieces b, S / pieces, ...), with pieces as examples."""
    return jnp.concatenate(jnp.split(x, pieces_a_shard(ring.layout), axis=1))


def _together(ring: Ring, x: Array) -> Array:
    """Undo `_apart`."""
    return jnp.concatenate(jnp.split(x, pieces_a_shard(ring.layout)), axis=1)
