"""One matrix fitted to its inputs, from the first entries to the last scales, in one program."""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from ..codebooks.codebook import code_dtype, round_entries
from ..codebooks.nearest import form_for
from ..formats import VQFormat
from .choice import CodeChoice, choose_all, decode_rows
from .feedback import inverse_factor, quantize_with_feedback
from .first_tables import fit_tables, sampled
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
    choice: CodeChoice
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
    """Tables as their int8 entries have them."""
    entries, scale = round_entries(tables)
    return entries.astype(jnp.float32) * scale


def weighed_vectors(matrix: jax.Array, inputs: jax.Array, how: Fit) -> tuple[jax.Array, jax.Array]:
    """Vectors of a matrix as they are fitted, and how much their values count."""
    rows, _, squares, inputs = _normalised(matrix, inputs, how.format)
    order = _by_importance(inputs, how.format.length)
    rows, inputs = _reordered(rows, inputs, order)
    return _vectors(rows, _weighed(inputs, how)[1], squares, how.format)


def _normalised(
    matrix: jax.Array, inputs: jax.Array, format: VQFormat
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows filled up and divided by the norms of columns, those norms, their weights, damped H."""
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
    """Blocks of rows, those with the largest inputs first.

    What is lost in them, all others can still make good. Codes are kept in the order of the matrix,
    so this costs no bits.
    """
    return jnp.argsort(-jnp.diag(inputs).reshape(-1, length).sum(1))


def _reordered(rows: jax.Array, inputs: jax.Array, order: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows and H with their blocks in another order."""
    length = rows.shape[0] // order.shape[0]
    each = (order[:, None] * length + jnp.arange(length)).reshape(-1)
    return rows[each], inputs[each][:, each]


def _weighed(inputs: jax.Array, how: Fit) -> tuple[jax.Array | None, jax.Array]:
    """The factor of H's inverse, and how much the rows count."""
    if not how.feedback:
        return None, jnp.diag(inputs)
    factor = inverse_factor(inputs)
    # With feedback, a row's error counts as far as no later row makes it good.
    return factor, 1 / jnp.diag(factor) ** 2


def _vectors(
    rows: jax.Array, counts: jax.Array, squares: jax.Array, format: VQFormat
) -> tuple[jax.Array, jax.Array]:
    """Vectors (blocks · out, length) of (in, out), and how much their values count."""

    def cut(matrix: jax.Array) -> jax.Array:
        blocks = matrix.reshape(-1, format.length, matrix.shape[1])
        return blocks.swapaxes(1, 2).reshape(-1, format.length)

    return cut(rows), cut(counts[:, None] * squares)
