"""Find the nearest codebook entry of many vectors.

Vectors are stored as (length, vectors), so that neighbouring lanes read neighbouring addresses.
The score of an entry is |x|² + |c|² − 2·x·c. It is never negative, and floats that are not negative
sort like their bit patterns. So the lowest bits of a score can store the index of its entry, and
the smallest key is the nearest entry. One `min` finds it, which every compiler vectorises, unlike
`argmin`. With 1024 entries a score keeps 13 bits of its fraction.
"""

from functools import partial
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

Form: TypeAlias = Literal["loop", "stream", "fused", "product"]
"""How scores are made: entry by entry in registers, for vectors that a cache holds (CPU) or for a
million at a time (many short ones on a GPU, which keeps all its processors busy so); by one
reduction of all entries (short vectors on GPU and TPU), or by a matrix product."""
# Past this, keys keep too little of a score; argmin is exact.
_MOST_KEYED = 4096
_LOOP_LENGTH, _FUSED_LENGTH = 32, 16
_ROUNDING = 1e-6
# Products in the body of the loop: many for many vectors, few where compiling takes the time.
_UNROLLED, _UNROLLED_SHORT, _MANY = 256, 64, 16_384
_CHUNK = {"loop": 32_768, "stream": 1_048_576, "fused": 1_048_576, "product": 4096}
# From so many vectors on, a GPU takes a third of the time of one reduction (H200, 8 × 1024).
_LEAST_STREAMED = 131_072


def form_for(length: int, entries: int, platform: str | None = None, vectors: int = 0) -> Form:
    """Return the fastest form for so many vectors on a platform; None is jax's default."""
    platform = platform or jax.default_backend()
    if entries > _MOST_KEYED:
        return "product"
    if platform == "cpu":
        return "loop" if length <= _LOOP_LENGTH else "product"
    if length > _FUSED_LENGTH:
        return "product"
    return "stream" if platform == "gpu" and vectors >= _LEAST_STREAMED else "fused"


def chunk_for(form: Form, vectors: int) -> int:
    """Return the number of vectors per chunk whose scores stay in cache."""
    return min(_CHUNK[form], -(-vectors // 128) * 128)


def nearest_in_chunk(
    vectors: jax.Array,
    entries: jax.Array,
    weights: jax.Array | None = None,
    *,
    form: Form,
    bound: jax.Array | None = None,
) -> jax.Array:
    """Return int32 (n,): the entry with the smallest score for each vector.

    Args:
        vectors: float32 (length, n).
        entries: float32 (entries, length).
        weights: (length, n) factors of squared differences, or None.
        form: See `Form`.
        bound: Largest norm of an entry. If given, the largest dot product is nearest.
    """
    size = entries.shape[0]
    bits = (size - 1).bit_length()
    if weights is not None:
        # Σ w·(x − c)² = Σ (√w·x − √w·c)²: the same products for every entry.
        weights = jnp.sqrt(weights)
        vectors = vectors * weights
        base = jnp.zeros_like(vectors[0])
    else:
        norms = (vectors * vectors).sum(0)
        base = norms if bound is None else 2 * jnp.sqrt(norms) * bound
        # A vector that is an entry scores zero, give or take the last digit; never less than zero.
        base = base + _ROUNDING * (base + (entries * entries).sum(1).max())
    bias = jnp.zeros(size) if bound is not None else (entries * entries).sum(1)
    twice = -2 * entries

    def keys(scores: jax.Array, number: jax.Array) -> jax.Array:
        raw = jax.lax.bitcast_convert_type(scores, jnp.int32)
        return (raw & ~((1 << bits) - 1)) | number

    def scores(entry: jax.Array, own: jax.Array) -> jax.Array:
        """Return scores for entries (with weights), or for −2 times the entries (without)."""
        if weights is None:
            made = base + own
            for value in range(vectors.shape[0]):
                made = made + entry[value] * vectors[value]
            return made
        made = base
        for value in range(vectors.shape[0]):
            made = made + (weights[value] * entry[value] - vectors[value]) ** 2
        return made

    if form in ("loop", "stream"):
        products = _UNROLLED if vectors.shape[1] >= _MANY else _UNROLLED_SHORT
        together = max(1, min(products // entries.shape[1], size))
        padded = -(-size // together) * together
        # What is past the last entry is the last one again.
        table = jnp.pad(
            entries if weights is not None else twice, ((0, padded - size), (0, 0)), mode="edge"
        )
        offsets = jnp.pad(bias, (0, padded - size), mode="edge")

        def some(step: jax.Array, best: jax.Array) -> jax.Array:
            for offset in range(together):
                number = step * together + offset
                made = keys(scores(table[number], offsets[number]), jnp.minimum(number, size - 1))
                best = jnp.minimum(best, made)
            return best

        start = jnp.full(vectors.shape[1], jnp.iinfo(jnp.int32).max, jnp.int32)
        best = jax.lax.fori_loop(0, padded // together, some, start)
        return best & ((1 << bits) - 1)
    numbers = jnp.arange(size, dtype=jnp.int32)[:, None]
    if form == "fused":
        chosen = entries if weights is not None else twice
        made = scores(chosen.T[:, :, None], bias[:, None])
        return jnp.min(keys(made, numbers), axis=0) & ((1 << bits) - 1)
    exact = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    if weights is None:
        made = base + bias[:, None] + exact(twice, vectors)
    else:
        offset = (vectors * vectors).sum(0)
        cross = exact(entries**2, weights**2) - 2 * exact(entries, weights * vectors)
        made = jnp.maximum(offset + cross, 0)
    if size > _MOST_KEYED:
        return jnp.argmin(made, axis=0).astype(jnp.int32)
    return jnp.min(keys(made, numbers), axis=0) & ((1 << bits) - 1)


def in_chunks(array: jax.Array, *, form: Form) -> jax.Array:
    """Reshape (count, length) to (chunks, length, chunk), padded with zeros."""
    count, length = array.shape
    chunk = chunk_for(form, count)
    rounds = -(-count // chunk)
    room = jnp.pad(array, ((0, rounds * chunk - count), (0, 0)))
    return room.reshape(rounds, chunk, length).swapaxes(1, 2)


@partial(jax.jit, static_argnames="form")
def _nearest(
    vectors: jax.Array, entries: jax.Array, weights: jax.Array | None, form: Form
) -> jax.Array:
    count = vectors.shape[0]
    cut = partial(in_chunks, form=form)
    if weights is None:
        indices = jax.lax.map(lambda part: nearest_in_chunk(part, entries, form=form), cut(vectors))
    else:
        indices = jax.lax.map(
            lambda parts: nearest_in_chunk(parts[0], entries, parts[1], form=form),
            (cut(vectors), cut(weights)),
        )
    return indices.reshape(-1)[:count]


def nearest(vectors: jax.Array, entries: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Return int32 (n,): the nearest of (entries, length) for each of (n, length).

    Args:
        vectors: float32 (n, length).
        entries: float32 (entries, length).
        weights: float32 (n, length) factors of squared differences, or None.
    """
    form = form_for(entries.shape[1], entries.shape[0], vectors=vectors.shape[0])
    return _nearest(vectors, entries, weights, form)
