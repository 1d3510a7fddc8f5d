"""Attention one block of scores at a time: a running softmax forward, recomputed scores backward.

Letters in the einsums: b batch, q queries, k keys, n key heads, g query heads to a key head,
d head size, v head size of the values.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

HIDDEN = -1e30  # finite, so that a row without any key yet makes no NaN
TINY = 1e-37


@dataclass(frozen=True)
class Sight:
    """Which keys a query attends to, and what becomes of their scores."""

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
        """(b or 1, 1, 1, q, k) booleans."""
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
        """The sums before the first key of values of that width, in float32 or better."""
        rows = jnp.zeros_like(q[..., 0], dtype=jnp.promote_types(q.dtype, jnp.float32))
        values = jnp.broadcast_to(rows[..., None], (*rows.shape, width))
        total = jnp.moveaxis(rows, -3, -1)
        return cls(values, jnp.full_like(total, HIDDEN), total)

    @property
    def output(self) -> Array:
        """(b, q, n, g, v) the attention output."""
        return self.values / _as_rows(jnp.maximum(self.total, TINY))

    @property
    def log_normalizer(self) -> Array:
        """(b, n, g, q) with which backward recomputes the weights."""
        return self.largest + jnp.log(jnp.maximum(self.total, TINY))


def add_block(sight: Sight, softmax: Softmax, queries: Queries, keys: KeyBlocks) -> Softmax:
    """Let a block of queries attend to a block of keys."""
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
    """What backward knows of a block of queries."""

    d_out: Array  # (b, q, n, g, v)
    overlap: Array  # (b, n, g, q) the dot product of d_out with the output
    log_normalizer: Array  # (b, n, g, q)


def block_gradients(
    sight: Sight, queries: Queries, keys: KeyBlocks, gradient: OutputGradient
) -> tuple[Array, Array, Array]:
    """What one block of scores adds to the gradients of q, k and v."""
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
    """(b, S, ...) to (S/block, b, block, ...)."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)


def from_blocks(x: Array) -> Array:
    """Undo `to_blocks`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _scores(
    sight: Sight, queries: Queries, keys: KeyBlocks, precise: jnp.dtype
) -> tuple[Array, Array | None]:
    """Scores (b, n, g, q, k), and the slope of the cap (None without one)."""
    scores = jnp.einsum("bqngd,bknd->bngqk", queries.q, keys.k, preferred_element_type=precise)
    scores = scores * sight.scale
    if sight.soft_cap is None:
        return scores, None
    bent = jnp.tanh(scores / sight.soft_cap)
    return sight.soft_cap * bent, 1 - bent * bent


def _as_rows(per_query: Array) -> Array:
    return jnp.moveaxis(per_query, -1, -3)[..., None]
