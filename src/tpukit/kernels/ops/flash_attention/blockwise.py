"""The mathematics of one block of scores in XLA: a running softmax, and its gradients.

Attention over blocks of rows (`xla`) and over a ring of devices (`parallel.ring`) both use it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from .spec import AttentionSpec

HIDDEN = -1e30  # finite, so that a row without any key yet gives no NaN
TINY = 1e-37


class Queries(NamedTuple):
    """A block of queries, or (with one more dimension in front) all blocks of a device."""

    q: Array  # (b, q, n, g, d)
    positions: Array  # (q,)
    segments: Array | None  # (b, q)
    mask: Array | None = None  # (b or 1, n or 1, g or 1, q or 1, k) booleans


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


def add_block(spec: AttentionSpec, softmax: Softmax, queries: Queries, keys: KeyBlocks) -> Softmax:
    """Add a block of keys to the softmax of a block of queries."""
    precise = softmax.values.dtype
    visible = _visible(spec, queries, keys)
    scores = jnp.where(visible, _scores(spec, queries, keys, precise)[0], HIDDEN)
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
    spec: AttentionSpec, queries: Queries, keys: KeyBlocks, gradient: OutputGradient
) -> tuple[Array, Array, Array]:
    """Return the contributions of one block of scores to the gradients of q, k and v."""
    precise = gradient.log_normalizer.dtype
    scores, slope = _scores(spec, queries, keys, precise)
    weights = jnp.exp(scores - gradient.log_normalizer[..., None])
    weights = jnp.where(_visible(spec, queries, keys), weights, 0)
    d_out = gradient.d_out
    d_weights = jnp.einsum("bqngv,bknv->bngqk", d_out, keys.v, preferred_element_type=precise)
    scale = spec.scale_of(queries.q.shape[-1])
    d_scores = weights * (d_weights - gradient.overlap[..., None]) * scale
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
    spec: AttentionSpec, queries: Queries, keys: KeyBlocks, precise: jnp.dtype
) -> tuple[Array, Array | None]:
    """Return scores (b, n, g, q, k), and the slope of the cap (None without one)."""
    scores = jnp.einsum("bqngd,bknd->bngqk", queries.q, keys.k, preferred_element_type=precise)
    return spec.cap(scores * spec.scale_of(queries.q.shape[-1]))


def _visible(spec: AttentionSpec, queries: Queries, keys: KeyBlocks) -> Array:
    """Return (b or 1, n or 1, g or 1, q, k) booleans."""
    rows, columns = queries.positions[:, None], keys.positions[None, :]
    visible = spec.allows(rows, columns)
    if spec.mask is not None:
        visible = visible & spec.mask.allows(rows, columns)
    visible = visible[None, None, None]
    if queries.segments is not None and keys.segments is not None:
        same = queries.segments[:, :, None] == keys.segments[:, None, :]
        visible = visible & same[:, None, None]
    return visible if queries.mask is None else visible & queries.mask


def _as_rows(per_query: Array) -> Array:
    return jnp.moveaxis(per_query, -1, -3)[..., None]
