"""Entries that a matrix's codes begin with: weighted k-means inside a compiled program.

`train_codebook` is for many vectors and looks at what every pass found; here the passes are one
loop, so that matrices of one shape are fitted side by side. What is left after it, the output error
decides (see `refinement`), so passes are few.
"""

import jax
import jax.numpy as jnp

from ..codebooks.lloyd import drawn_together, plus_plus, sample_size, sums_of_chunks
from ..codebooks.nearest import Form, in_chunks, nearest, nearest_in_chunk
from ..formats import VQFormat

_MOST_PER_ENTRY, _LEAST_MOST = 256, 65_536
_PASSES = 16
_STRIDE = 1.9  # see `codebook_training`
_LEAST_PLUS_PLUS = 128
_RESPAWN_SAMPLE = 4096


def sampled(
    vectors: jax.Array, weights: jax.Array, key: jax.Array, entries: int
) -> tuple[jax.Array, jax.Array]:
    """Vectors and their weights in an order without pattern, as many as k-means needs."""
    most = min(vectors.shape[0], max(_LEAST_MOST, _MOST_PER_ENTRY * entries))
    order = jax.random.permutation(key, vectors.shape[0])[:most]
    return vectors[order], weights[order]


def fit_tables(
    vectors: jax.Array, weights: jax.Array, key: jax.Array, *, format: VQFormat, form: Form
) -> jax.Array:
    """float32 (stages, entries, length), each stage fitted to what those before leave.

    Args:
        vectors: float32 (n, length), shuffled.
        weights: (n, length) by which squared errors count.
        key: Of the first entries.
        format: Stages, entries, length.
        form: How entries are compared.
    """
    if vectors.shape[0] <= format.entries:  # each is its own entry, and nothing is left
        missing = format.entries - vectors.shape[0]
        return jnp.pad(vectors[None], ((0, format.stages - 1), (0, missing), (0, 0)))
    tables: list[jax.Array] = []
    for own in jax.random.split(key, format.stages):
        table = _fitted(vectors, weights, own, format.entries, form)
        tables.append(table)
        vectors = vectors - table[nearest(vectors, table, weights)]
    return jnp.stack(tables)


def _fitted(
    vectors: jax.Array, weights: jax.Array, key: jax.Array, entries: int, form: Form
) -> jax.Array:
    count = vectors.shape[0]
    if count < _LEAST_PLUS_PLUS:
        table = vectors[:entries]
    else:
        some = sample_size(entries)
        table = plus_plus(
            vectors[:some],
            weights[:some].mean(1),
            key,
            entries=entries,
            together=drawn_together(form),
        )
    values, own = (in_chunks(one, form=form)[:, None] for one in (vectors, weights))

    def one_pass(step: jax.Array, table: jax.Array) -> jax.Array:
        found = sums_of_chunks(values, own, table, count, None, form=form, axis=None)
        last = step == _PASSES - 1
        means = found.total / jnp.maximum(found.mass, 1e-30)
        reach = jnp.where(last, 1.0, _STRIDE)
        moved = jnp.where(found.mass > 0, table + reach * (means - table), table)
        empty = (found.mass.sum(1) == 0) & ~last
        return _respawned(vectors, weights, moved, empty, form)

    return jax.lax.fori_loop(0, _PASSES, one_pass, table)


def _respawned(
    vectors: jax.Array, weights: jax.Array, table: jax.Array, empty: jax.Array, form: Form
) -> jax.Array:
    """Put entries that nobody chose onto the vectors of a sample with the largest errors."""
    some, own = vectors[:_RESPAWN_SAMPLE], weights[:_RESPAWN_SAMPLE]
    codes = nearest_in_chunk(some.T, table, own.T, form=form)
    lost = (own * (some - table[codes]) ** 2).sum(1)
    worst = jax.lax.top_k(lost, min(some.shape[0], table.shape[0]))[1]
    rank = jnp.clip(jnp.cumsum(empty) - 1, 0, worst.shape[0] - 1)
    return jnp.where(empty[:, None], some[worst[rank]], table)
