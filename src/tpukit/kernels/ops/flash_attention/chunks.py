"""Chunked attention: a query attends to the keys of its own chunk, up to itself.

Chunks have nothing to do with each other, so they are examples of their own: causal attention of
shorter sequences, in every implementation, that neither computes nor reads what is not attended to.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def attend_in_chunks(
    attend: Callable[..., jax.Array], *arrays: jax.Array | None, chunk: int | None
) -> jax.Array:
    """Causal attention within chunks of so many tokens.

    Args:
        attend: Causal attention of the arrays.
        *arrays: Queries, and whatever else has tokens as its second axis, (B, S, ...); or None.
        chunk: Tokens of a chunk; the last one may have fewer.
    """
    queries = arrays[0]
    assert queries is not None
    batch, length = queries.shape[:2]
    if chunk is None or chunk >= length:
        return attend(*arrays)
    whole = length // chunk * chunk

    def by_chunk(x: jax.Array) -> jax.Array:
        return x[:, :whole].reshape(-1, chunk, *x.shape[2:])

    out = attend(*(None if x is None else by_chunk(x) for x in arrays))
    out = out.reshape(batch, whole, *out.shape[2:])
    if whole == length:
        return out
    rest = attend(*(None if x is None else x[:, whole:] for x in arrays))
    return jnp.concatenate([out, rest], axis=1)
