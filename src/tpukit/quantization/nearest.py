"""The nearest entry of a codebook, for many vectors, in chunks that stay in cache."""

from functools import partial

import jax
import jax.numpy as jnp

_CHUNK = 8192


@partial(jax.jit, static_argnames="chunk")
def nearest(
    vectors: jax.Array, entries: jax.Array, weights: jax.Array | None = None, *, chunk: int = _CHUNK
) -> jax.Array:
    """int32 (n,): which of (entries, length) is nearest to each of (n, length).

    Args:
        vectors: float32 (n, length).
        entries: float32 (entries, length).
        weights: float32 (n, length) that squared differences are multiplied with, or None.
        chunk: How many vectors are compared at a time.
    """
    squares = entries * entries

    def some(vector: jax.Array, weight: jax.Array | None) -> jax.Array:
        if weight is None:
            scores = squares.sum(1) - 2 * vector @ entries.T
        else:
            scores = weight @ squares.T - 2 * (weight * vector) @ entries.T
        return jnp.argmin(scores, axis=1).astype(jnp.int32)

    count = vectors.shape[0]
    if count <= chunk:
        return some(vectors, weights)
    padded = -(-count // chunk) * chunk

    def cut(array: jax.Array) -> jax.Array:
        room = jnp.pad(array, ((0, padded - count), (0, 0)))
        return room.reshape(-1, chunk, array.shape[1])

    if weights is None:
        found = jax.lax.map(lambda part: some(part, None), cut(vectors))
    else:
        found = jax.lax.map(lambda parts: some(*parts), (cut(vectors), cut(weights)))
    return found.reshape(-1)[:count]
