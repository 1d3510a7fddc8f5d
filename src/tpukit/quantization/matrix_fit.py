"""One matrix fitted to its inputs, from the first entries to the last scales, in one program."""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from .choice import Choice, decode_rows
from .codebook import code_dtype, round_entries
from .feedback import inverse_factor, quantize_with_feedback
from .first_tables import fit_tables, sampled
from .formats import VQFormat
from .nearest import form_for
from .refinement import refit_entries, refit_scales, sweep_codes
from .trellis import pack_bits, padded_width
from .vq_array import VQArray

_REFINEMENTS = 2
DAMPING = 0.01
"""Share of the mean of its diagonal that is added to H: inputs nobody saw still count."""


@dataclass(frozen=True)
class Fit:
    """How matrices are fitted; one compiled program for each and every shape.

    Attributes:
        format: Length, entries, stages.
        feedback: See `quantize_matrix`, as `refit`.
        refit: Whether entries, codes and scales are refined.
        choice: Who chooses codes.
        fitted: Whether tables are given; otherwise k-means makes them.
    """

    format: VQFormat
    feedback: bool
    refit: bool
    choice: Choice
    fitted: bool


@lru_cache(maxsize=256)
def fit_program(how: Fit, *, side_by_side: bool) -> Any:
    """(matrices, H of each, tables or None, key) to a stack of `VQArray`s.

    Side by side, or for stacks of one: a CPU gains nothing from many at once.
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
    rows, scales, squares, inputs, factor, counts = prepared(matrix, inputs, how)
    if tables is None:
        tables = _first_tables(rows, counts, squares, key, chosen)
    if factor is None:
        codes = _choose_all(rows, counts, squares, tables, choice=how.choice)
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
    every = vectors_of(rows, counts, squares, format)
    vectors, weights = sampled(*every, order, format.entries)
    form = form_for(format.length, format.entries)
    return fit_tables(vectors, weights, first, format=format, form=form)


def _kept(tables: jax.Array) -> jax.Array:
    """Tables as their int8 entries have them."""
    entries, scale = round_entries(tables)
    return entries.astype(jnp.float32) * scale


def prepared(
    matrix: jax.Array, inputs: jax.Array, how: Fit
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array]:
    """Rows, column scales, their weights, damped H, its inverse's factor, and rows' weights."""
    wide = padded_width(matrix.shape[1]) if how.format.trellis else matrix.shape[1]
    normal = _normalised(matrix, inputs, length=how.format.length, wide=wide)
    rows, scales, squares, inputs = normal
    factor = inverse_factor(inputs) if how.feedback else None
    # With feedback, a row's error counts as far as no later row makes it good.
    counts = jnp.diag(inputs) if factor is None else 1 / jnp.diag(factor) ** 2
    return rows, scales, squares, inputs, factor, counts


def _normalised(
    matrix: jax.Array, inputs: jax.Array, *, length: int, wide: int
) -> tuple[jax.Array, ...]:
    """Rows filled up and divided by the norms of columns, those norms, their weights, damped H."""
    height, width = matrix.shape
    missing = -height % length
    padded = jnp.pad(matrix, ((0, missing), (0, wide - width)))
    # Rows that are not there count a little, so that H can be inverted.
    floor = DAMPING * jnp.mean(jnp.diag(inputs))
    damped = jnp.pad(inputs, (0, missing)) + floor * jnp.eye(height + missing)
    scales = jnp.sqrt(jnp.mean(padded**2, axis=0))
    scales = jnp.where(scales == 0, 1.0, scales)
    # How much a column counts; none that is padding does.
    squares = jnp.where(jnp.arange(wide) < width, scales**2, 0)
    return padded / scales, scales, squares / squares.mean(), damped


def vectors_of(
    rows: jax.Array, counts: jax.Array, squares: jax.Array, format: VQFormat
) -> tuple[jax.Array, jax.Array]:
    """Vectors (blocks · out, length) of (in, out), and how much their values count."""

    def cut(matrix: jax.Array) -> jax.Array:
        blocks = matrix.reshape(-1, format.length, matrix.shape[1])
        return blocks.swapaxes(1, 2).reshape(-1, format.length)

    return cut(rows), cut(counts[:, None] * squares)


def _choose_all(
    rows: jax.Array, counts: jax.Array, squares: jax.Array, tables: jax.Array, *, choice: Choice
) -> jax.Array:
    """Codes (stages, blocks, out), each block for itself, weighted by the inputs."""
    length, width = tables.shape[2], rows.shape[1]

    def block(parts: tuple[jax.Array, jax.Array]) -> jax.Array:
        measure = jnp.sqrt(parts[1])
        return choice.codes(measure[:, None] * parts[0], tables * measure, squares)

    blocks = (rows.reshape(-1, length, width), counts.reshape(-1, length))
    return jax.lax.map(block, blocks).swapaxes(0, 1)
