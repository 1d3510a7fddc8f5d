"""Choose codes with error feedback, and refine entries and codes for the output error.

With H = XᵀX of a layer's inputs and H⁻¹ = UᵀU (U upper), rounding rows s of a column has the error
|U_ss⁻ᵀ·(w − q)|² after the best update of the later rows, −U_s,restᵀ·U_ss⁻ᵀ·(w − q). So each block
of `length` rows takes the nearest entry in that metric (GPTVQ uses its diagonal), and the rows
below are updated: at once within a group, and by one matmul for all groups below.

The output error of a layer is tr(ΔᵀHΔ). Given codes it is a quadratic form of the entries, which
conjugate gradients minimise. Given entries, the best codes of a block are nearest to the rows that
compensate the errors of the rest of the column. Neither step raises the error.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.scipy.sparse.linalg import cg

from .choice import CodeChoice, decode_rows

_GROUP_ROWS = 128


def group_blocks(blocks: int, length: int) -> int:
    """Return the blocks per group: the largest divisor of the blocks with up to 128 rows."""
    most = max(1, _GROUP_ROWS // length)
    return next(size for size in range(min(most, blocks), 0, -1) if blocks % size == 0)


def diagonal_blocks(matrix: jax.Array, length: int) -> jax.Array:
    """Return the diagonal blocks (blocks, length, length) of (in, in)."""
    blocks = matrix.shape[0] // length
    number = jnp.arange(blocks)
    return matrix.reshape(blocks, length, blocks, length)[number, :, number]


@jax.jit
def inverse_factor(hessian: jax.Array) -> jax.Array:
    """Return the upper triangular U with H⁻¹ = UᵀU."""
    lower = jnp.linalg.cholesky(hessian)
    half = jax.scipy.linalg.solve_triangular(lower, jnp.eye(hessian.shape[0]), lower=True)
    return jnp.linalg.cholesky(half.T @ half).T


@partial(jax.jit, static_argnames="choice")
def quantize_with_feedback(
    rows: jax.Array,
    factor: jax.Array,
    squares: jax.Array,
    tables: jax.Array,
    *,
    choice: CodeChoice,
) -> jax.Array:
    """Choose int32 codes (stages, blocks, out) of (in, out) rows with error feedback.

    Args:
        rows: float32, `in` a multiple of length.
        factor: (in, in), from `inverse_factor`.
        squares: (out,) weights of columns.
        tables: float32 (stages, entries, length).
        choice: How codes are chosen.
    """
    height, width = rows.shape
    length = tables.shape[2]
    blocks = height // length
    size = group_blocks(blocks, length)
    tall = size * length
    number = jnp.arange(height)
    inside = jnp.arange(tall)
    # All at once: a GPU takes as long for one of these small systems as for hundreds.
    corners = diagonal_blocks(factor, length).swapaxes(1, 2)
    eyes = jnp.broadcast_to(jnp.eye(length), corners.shape)
    measures = jax.scipy.linalg.solve_triangular(corners, eyes, lower=True)

    def group(rows: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = at * tall
        own = jax.lax.dynamic_slice(factor, (start, 0), (tall, height))
        square = jax.lax.dynamic_slice(own, (0, start), (tall, tall))

        def block(part: jax.Array, step: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            top = step * length
            measure = measures[at * size + step]
            wanted = jax.lax.dynamic_slice(part, (top, 0), (length, width))
            codes = choice.codes(measure @ wanted, tables @ measure.T, squares)
            lost = measure @ (wanted - decode_rows(codes[:, None], tables))
            right = jax.lax.dynamic_slice(square, (top, 0), (length, tall))
            right = jnp.where(inside >= top + length, right, 0)
            return part - right.T @ lost, (codes, lost)

        part = jax.lax.dynamic_slice(rows, (start, 0), (tall, width))
        _, (codes, lost) = jax.lax.scan(block, part, jnp.arange(size))
        below = jnp.where(number >= start + tall, own, 0)
        return rows - below.T @ lost.reshape(tall, width), codes

    codes = jax.lax.scan(group, rows, jnp.arange(blocks // size))[1]
    return codes.reshape(blocks, tables.shape[0], width).swapaxes(0, 1)


_CG_STEPS = 16


def _gather(rows: jax.Array, codes: jax.Array, entries: int) -> jax.Array:
    """Sum the rows of each entry to (stages, entries, length), the transpose of `decode_rows`."""
    length = rows.shape[0] // codes.shape[1]
    vectors = rows.reshape(-1, length, rows.shape[1]).swapaxes(1, 2).reshape(-1, length)
    return jax.vmap(lambda own: jax.ops.segment_sum(vectors, own.reshape(-1), entries))(codes)


@jax.jit
def refit_entries(
    rows: jax.Array, hessian: jax.Array, squares: jax.Array, codes: jax.Array, tables: jax.Array
) -> jax.Array:
    """Return tables (stages, entries, length) with the smallest output error for given codes.

    Args:
        rows: float32 (in, out), columns normalised.
        hessian: (in, in).
        squares: (out,) squared norms of columns, which are their weights.
        codes: int32 (stages, blocks, out).
        tables: Initial tables.
    """
    entries = tables.shape[1]

    def pull(matrix: jax.Array) -> jax.Array:
        return _gather((hessian @ matrix) * squares, codes, entries)

    weight = jnp.broadcast_to(jnp.diag(hessian)[:, None] * squares, rows.shape)
    diagonal = _gather(weight, codes, entries)
    # An entry without vectors stays where it is.
    damping = 1e-6 * diagonal.max()
    solution, _ = cg(
        lambda table: pull(decode_rows(codes, table)) + damping * table,
        pull(rows) + damping * tables,
        x0=tables,
        maxiter=_CG_STEPS,
        M=lambda table: table / (diagonal + damping),
    )
    return solution


@jax.jit
def refit_scales(rows: jax.Array, hessian: jax.Array, decoded: jax.Array) -> jax.Array:
    """Return factors (out,) of decoded columns with the smallest output error."""
    pulled = hessian @ decoded
    size = (pulled * decoded).sum(0)
    return jnp.where(size > 0, (pulled * rows).sum(0) / jnp.where(size > 0, size, 1), 1.0)


def _size(lower: jax.Array, lost: jax.Array) -> jax.Array:
    """Return the error of a block in the metric of its diagonal block of H."""
    return ((lower.T @ lost) ** 2).sum(0)


@partial(jax.jit, static_argnames="choice")
def sweep_codes(
    rows: jax.Array,
    hessian: jax.Array,
    squares: jax.Array,
    codes: jax.Array,
    tables: jax.Array,
    *,
    choice: CodeChoice,
) -> jax.Array:
    """Choose the codes of each block of rows again, with all others fixed; return all codes.

    With e the error w − q of all other rows, the best entry of a block s is nearest to
    w + H_ss⁻¹·H_s,rest·e in the metric of H_ss.

    Args:
        rows: float32 (in, out), columns normalised.
        hessian: (in, in).
        squares: (out,) weights of columns.
        codes: int32 (stages, blocks, out).
        tables: (stages, entries, length).
        choice: How codes are chosen.
    """
    height, width = rows.shape
    stages, blocks, _ = codes.shape
    length = height // blocks
    size = group_blocks(blocks, length)
    tall = size * length

    def group(carried: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Update one group; the carried array is H·Δ."""
        start = at * tall
        own = jax.lax.dynamic_slice(hessian, (0, start), (height, tall))
        square = jax.lax.dynamic_slice(own, (start, 0), (tall, tall))
        lost = jax.lax.dynamic_slice(delta, (start, 0), (tall, width))
        before = jax.lax.dynamic_slice(codes, (0, at * size, 0), (stages, size, width))

        def block(
            state: tuple[jax.Array, jax.Array], step: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            pulled, lost = state
            top = step * length
            lower = lowers[at * size + step]
            here = jax.lax.dynamic_slice(lost, (top, 0), (length, width))
            pull = jax.lax.dynamic_slice(pulled, (top, 0), (length, width))
            exact = jax.lax.dynamic_slice(rows, (start + top, 0), (length, width))
            wanted = exact - here + inverses[at * size + step] @ pull
            new = choice.codes(lower.T @ wanted, tables @ lower, squares)
            # The search is not exhaustive, so what was chosen before may be the better.
            old = jax.lax.dynamic_slice(before, (0, step, 0), (stages, 1, width))[:, 0]
            made = decode_rows(new[:, None], tables)
            gain = _size(lower, wanted - (exact - here)) - _size(lower, wanted - made)
            better = choice.shared(gain * squares) > 0
            chosen = jnp.where(better, new, old)
            change = jnp.where(better, exact - made - here, 0)
            column = jax.lax.dynamic_slice(square, (0, top), (tall, length))
            lost = jax.lax.dynamic_update_slice(lost, here + change, (top, 0))
            return (pulled + column @ change, lost), chosen

        part = jax.lax.dynamic_slice(carried, (start, 0), (tall, width))
        (_, new), codes_by_block = jax.lax.scan(block, (part, lost), jnp.arange(size))
        return carried + own @ (new - lost), codes_by_block

    lowers = jnp.linalg.cholesky(diagonal_blocks(hessian, length))
    eyes = jnp.broadcast_to(jnp.eye(length), lowers.shape)
    halves = jax.scipy.linalg.solve_triangular(lowers, eyes, lower=True)
    inverses = halves.swapaxes(1, 2) @ halves
    delta = rows - decode_rows(codes, tables)
    codes_by_group = jax.lax.scan(group, hessian @ delta, jnp.arange(blocks // size))[1]
    return codes_by_group.reshape(blocks, stages, width).swapaxes(0, 1)
