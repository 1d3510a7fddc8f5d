"""Chunked attention: a query attends to the keys of its own chunk, up to itself.

Chunks have nothing to do with each other, so they are examples of their own: causal attention of
shorter sequences, in every implementation, that neither computes nor reads what is not attended to.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# q, k, v and segment ids (B, S) -> the result
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]


def attend_in_chunks(
    attend: Attend,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    *,
    chunk: int | None,
) -> jax.Array:
    """Causal attention `attend` of (B, S, heads, D) arrays within chunks of so many tokens."""
    batch, length = q.shape[:2]
    if chunk is None or chunk >= length:
        return attend(q, k, v, segment_ids)
    whole = length // chunk * chunk

    def by_chunk(x: jax.Array) -> jax.Array:
        return x[:, :whole].reshape(-1, chunk, *x.shape[2:])

    def after(x: jax.Array) -> jax.Array:
        return x[:, whole:]

    ids = None if segment_ids is None else by_chunk(segment_ids)
    out = attend(by_chunk(q), by_chunk(k), by_chunk(v), ids)
    out = out.reshape(batch, whole, *out.shape[2:])
    if whole == length:
        return out
    ids = None if segment_ids is None else after(segment_ids)
    return jnp.concatenate([out, attend(after(q), after(k), after(v), ids)], axis=1)
