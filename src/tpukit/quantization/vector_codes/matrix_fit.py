"""Fit codebooks, codes and scales to matrices of one shape, in one compiled program.

`train_codebook` is for many vectors and checks the error after every pass. Here the k-means passes
are one loop, so that matrices are fitted in parallel. They are few, because entries are refined for
the output error afterwards (see `refinement`).
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from ..codebooks.codebook import code_dtype, round_entries
from ..codebooks.lloyd import drawn_together, plus_plus, sample_size, sums_of_chunks
from ..codebooks.nearest import Form, form_for, in_chunks, nearest, nearest_in_chunk
from ..formats import VQFormat
from .choice import CodeChoice, choose_all, decode_rows
from .refinement import (
    inverse_factor,
    quantize_with_feedback,
    refit_entries,
    refit_scales,
    sweep_codes,
)
from .trellis import pack_bits, padded_width
from .vq_array import VQArray

_MOST_PER_ENTRY, _LEAST_MOST = 256, 65_536
_PASSES = 16
_STRIDE = 1.9  # see `codebook_training`
_LEAST_PLUS_PLUS = 128
_RESPAWN_SAMPLE = 4096


def sampled(
    vectors: jax.Array, weights: jax.Array, key: jax.Array, entries: int
) -> tuple[jax.Array, jax.Array]:
    """Return a shuffled sample of vectors and their weights for k-means."""
    most = min(vectors.shape[0], max(_LEAST_MOST, _MOST_PER_ENTRY * entries))
    order = jax.random.permutation(key, vectors.shape[0])[:most]
    return vectors[order], weights[order]


def fit_tables(
    vectors: jax.Array, weights: jax.Array, key: jax.Array, *, format: VQFormat, form: Form
) -> jax.Array:
    """Fit tables (stages, entries, length), each stage to the residuals of the earlier ones.

    Args:
        vectors: float32 (n, length), shuffled.
        weights: (n, length) factors of squared errors.
        key: Random key of the initial entries.
        format: Gives stages, entries and length.
        form: The way of comparing entries.
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
    values, own = (in_chunks(array, form=form)[:, None] for array in (vectors, weights))

    def one_pass(step: jax.Array, table: jax.Array) -> jax.Array:
        sums = sums_of_chunks(values, own, table, count, None, form=form, axis=None)
        last = step == _PASSES - 1
        means = sums.total / jnp.maximum(sums.mass, 1e-30)
        reach = jnp.where(last, 1.0, _STRIDE)
        moved = jnp.where(sums.mass > 0, table + reach * (means - table), table)
        empty = (sums.mass.sum(1) == 0) & ~last
        return _respawned(vectors, weights, moved, empty, form)

    return jax.lax.fori_loop(0, _PASSES, one_pass, table)


def _respawned(
    vectors: jax.Array, weights: jax.Array, table: jax.Array, empty: jax.Array, form: Form
) -> jax.Array:
    """Move entries that no vector chose to the vectors of a sample with the largest errors."""
    some, own = vectors[:_RESPAWN_SAMPLE], weights[:_RESPAWN_SAMPLE]
    codes = nearest_in_chunk(some.T, table, own.T, form=form)
    lost = (own * (some - table[codes]) ** 2).sum(1)
    worst = jax.lax.top_k(lost, min(some.shape[0], table.shape[0]))[1]
    rank = jnp.clip(jnp.cumsum(empty) - 1, 0, worst.shape[0] - 1)
    return jnp.where(empty[:, None], some[worst[rank]], table)


_REFINEMENTS = 2
DAMPING = 0.01
"""Share of the mean of its diagonal that is added to H: inputs nobody saw still count."""


@dataclass(frozen=True)
class Fit:
    """Options of a fit; there is one compiled program per fit and shape.

    Attributes:
        format: Gives length, entries and stages.
        feedback: Whether later rows compensate errors of earlier rows.
        refit: Whether entries, codes and scales are refined.
        choice: How codes are chosen.
        fitted: Whether tables are given; otherwise k-means fits them.
    """

    format: VQFormat
    feedback: bool
    refit: bool
    choice: CodeChoice
    fitted: bool


@lru_cache(maxsize=256)
def fit_program(how: Fit, *, side_by_side: bool) -> Any:
    """Return a program from (matrices, hessians, tables or None, key) to a stack of `VQArray`s.

    On a CPU it takes stacks of one, because a CPU gains nothing from batching.
    """
    fit = partial(_fit, how=how)
    if side_by_side:
        return jax.jit(jax.vmap(fit, in_axes=(0, 0, 0 if how.fitted else None, None)))

    def alone(
        matrices: jax.Array, inputs: jax.Array, tables: jax.Array | None, key: jax.Array
    ) -> VQArray:
        made = fit(matrices[0], inputs[0], None if tables is None else tables[0], key)
        return jax.tree.map(lambda leaf: leaf[None], made)

    return jax.jit(alone)


def _fit(
    matrix: jax.Array, inputs: jax.Array, tables: jax.Array | None, key: jax.Array, *, how: Fit
) -> VQArray:
    # GPUs would round what is multiplied to 10 bits.
    with jax.default_matmul_precision("highest"):
        return _fit_exactly(matrix, inputs, tables, key, how)


def _fit_exactly(
    matrix: jax.Array, inputs: jax.Array, tables: jax.Array | None, key: jax.Array, how: Fit
) -> VQArray:
    (height, width), chosen = matrix.shape, how.format
    rows, scales, squares, inputs = _normalised(matrix, inputs, how.format)
    order = _by_importance(inputs, chosen.length)
    rows, inputs = _reordered(rows, inputs, order)
    factor, counts = _weighed(inputs, how)
    if tables is None:
        tables = _first_tables(rows, counts, squares, key, chosen)
    if factor is None:
        codes = choose_all(rows, counts, squares, tables, choice=how.choice)
    else:
        codes = quantize_with_feedback(rows, factor, squares, tables, choice=how.choice)
    if how.refit:

        def refine(
            step: jax.Array, state: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            codes, tables = state
            tables = refit_entries(rows, inputs, squares, codes, tables)
            # The last codes are chosen among the entries that are kept.
            tables = jnp.where(step == _REFINEMENTS, _kept(tables), tables)
            return sweep_codes(rows, inputs, squares, codes, tables, choice=how.choice), tables

        codes, refined = jax.lax.fori_loop(0, _REFINEMENTS + 1, refine, (codes, tables))
        entries, scale = round_entries(refined)
        decoded = decode_rows(codes, entries.astype(jnp.float32) * scale)
        scales = scales * refit_scales(rows, inputs, decoded)
    else:
        entries, scale = round_entries(tables)
    codes = codes[:, jnp.argsort(order)]
    if chosen.trellis:
        codes = pack_bits(codes & (2**chosen.trellis - 1), chosen.trellis)
    return VQArray(
        codes.astype(code_dtype(chosen.entries) if not chosen.trellis else jnp.uint8),
        entries,
        (scales * scale)[:width].astype(jnp.bfloat16),
        None,
        (height, width),
        chosen.layout,
    )


def _first_tables(
    rows: jax.Array, counts: jax.Array, squares: jax.Array, key: jax.Array, format: VQFormat
) -> jax.Array:
    order, first = jax.random.split(key)
    every = _vectors(rows, counts, squares, format)
    vectors, weights = sampled(*every, order, format.entries)
    form = form_for(format.length, format.entries)
    return fit_tables(vectors, weights, first, format=format, form=form)


def _kept(tables: jax.Array) -> jax.Array:
    """Round tables to int8 entries and back."""
    entries, scale = round_entries(tables)
    return entries.astype(jnp.float32) * scale


def weighed_vectors(matrix: jax.Array, inputs: jax.Array, how: Fit) -> tuple[jax.Array, jax.Array]:
    """Return normalised vectors of a matrix, and the weights of their values."""
    rows, _, squares, inputs = _normalised(matrix, inputs, how.format)
    order = _by_importance(inputs, how.format.length)
    rows, inputs = _reordered(rows, inputs, order)
    return _vectors(rows, _weighed(inputs, how)[1], squares, how.format)


def _normalised(
    matrix: jax.Array, inputs: jax.Array, format: VQFormat
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return padded rows divided by column norms, the norms, their weights, and the damped H."""
    height, width = matrix.shape
    wide = padded_width(width) if format.trellis else width
    missing = -height % format.length
    padded = jnp.pad(matrix, ((0, missing), (0, wide - width)))
    # Rows that are not there count a little, so that H can be inverted.
    floor = DAMPING * jnp.mean(jnp.diag(inputs))
    damped = jnp.pad(inputs, (0, missing)) + floor * jnp.eye(height + missing)
    scales = jnp.sqrt(jnp.mean(padded**2, axis=0))
    scales = jnp.where(scales == 0, 1.0, scales)
    # How much a column counts; none that is padding does.
    squares = jnp.where(jnp.arange(wide) < width, scales**2, 0)
    return padded / scales, scales, squares / squares.mean(), damped


def _by_importance(inputs: jax.Array, length: int) -> jax.Array:
    """Return the order of blocks of rows, largest inputs first.

    All later blocks can compensate the error of the first ones. Codes are stored in the order of
    the matrix, so this takes no bits.
    """
    return jnp.argsort(-jnp.diag(inputs).reshape(-1, length).sum(1))


def _reordered(rows: jax.Array, inputs: jax.Array, order: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return rows and H with reordered blocks."""
    length = rows.shape[0] // order.shape[0]
    each = (order[:, None] * length + jnp.arange(length)).reshape(-1)
    return rows[each], inputs[each][:, each]


def _weighed(inputs: jax.Array, how: Fit) -> tuple[jax.Array | None, jax.Array]:
    """Return the factor of H's inverse, and the weights of rows."""
    if not how.feedback:
        return None, jnp.diag(inputs)
    factor = inverse_factor(inputs)
    # With feedback, a row's error counts as far as no later row makes it good.
    return factor, 1 / jnp.diag(factor) ** 2


def _vectors(
    rows: jax.Array, counts: jax.Array, squares: jax.Array, format: VQFormat
) -> tuple[jax.Array, jax.Array]:
    """Return vectors (blocks · out, length) of (in, out), and the weights of their values."""

    def cut(matrix: jax.Array) -> jax.Array:
        blocks = matrix.reshape(-1, format.length, matrix.shape[1])
        return blocks.swapaxes(1, 2).reshape(-1, format.length)

    return cut(rows), cut(counts[:, None] * squares)
