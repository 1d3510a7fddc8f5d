"""After codes are chosen: entries fitted to the output error, and codes chosen anew beside others.

The output error of a layer is tr(ΔᵀHΔ). Given codes it is a quadratic form of the entries, which
conjugate gradients minimise; given entries, each block of codes is best where it is nearest to the
rows that the rest of its column leaves to be made good. Both only ever lower the error.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.scipy.sparse.linalg import cg

from .choice import CodeChoice, decode_rows
from .feedback import diagonal_blocks, group_blocks

_CG_STEPS = 16


def _gather(rows: jax.Array, codes: jax.Array, entries: int) -> jax.Array:
    """(stages, entries, length): the rows of each entry, added up; `decode_rows` transposed."""
    length = rows.shape[0] // codes.shape[1]
    vectors = rows.reshape(-1, length, rows.shape[1]).swapaxes(1, 2).reshape(-1, length)
    return jax.vmap(lambda own: jax.ops.segment_sum(vectors, own.reshape(-1), entries))(codes)


@jax.jit
def refit_entries(
    rows: jax.Array, hessian: jax.Array, squares: jax.Array, codes: jax.Array, tables: jax.Array
) -> jax.Array:
    """Tables (stages, entries, length) with the least output error for codes.

    Args:
        rows: float32 (in, out), columns normalised.
        hessian: (in, in).
        squares: (out,): squared norms that columns were divided by; how much they count.
        codes: int32 (stages, blocks, out).
        tables: Where to begin.
    """
    entries = tables.shape[1]

    def pull(matrix: jax.Array) -> jax.Array:
        return _gather((hessian @ matrix) * squares, codes, entries)

    weight = jnp.broadcast_to(jnp.diag(hessian)[:, None] * squares, rows.shape)
    diagonal = _gather(weight, codes, entries)
    # An entry without vectors stays where it is.
    damping = 1e-6 * diagonal.max()
    found, _ = cg(
        lambda table: pull(decode_rows(codes, table)) + damping * table,
        pull(rows) + damping * tables,
        x0=tables,
        maxiter=_CG_STEPS,
        M=lambda table: table / (diagonal + damping),
    )
    return found


@jax.jit
def refit_scales(rows: jax.Array, hessian: jax.Array, decoded: jax.Array) -> jax.Array:
    """(out,): what to multiply decoded columns with for the least output error."""
    pulled = hessian @ decoded
    size = (pulled * decoded).sum(0)
    return jnp.where(size > 0, (pulled * rows).sum(0) / jnp.where(size > 0, size, 1), 1.0)


def _size(lower: jax.Array, lost: jax.Array) -> jax.Array:
    """Of what a block loses, in the measure of its corner of H."""
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
    """Choose the codes of each block of rows anew, beside all others; returns all codes.

    A block leaves r = w − q. Beside what the others lose, e, its best is the entry nearest to
    w + H_ss⁻¹·H_s,rest·e in the measure of H_ss.

    Args:
        rows: float32 (in, out), columns normalised.
        hessian: (in, in).
        squares: (out,): how much a column counts.
        codes: int32 (stages, blocks, out).
        tables: (stages, entries, length).
        choice: Who chooses codes.
    """
    height, width = rows.shape
    stages, blocks, _ = codes.shape
    length = height // blocks
    size = group_blocks(blocks, length)
    tall = size * length

    def group(carried: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Carried is H·Δ."""
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
            found = jnp.where(better, new, old)
            change = jnp.where(better, exact - made - here, 0)
            column = jax.lax.dynamic_slice(square, (0, top), (tall, length))
            lost = jax.lax.dynamic_update_slice(lost, here + change, (top, 0))
            return (pulled + column @ change, lost), found

        part = jax.lax.dynamic_slice(carried, (start, 0), (tall, width))
        (_, new), found = jax.lax.scan(block, (part, lost), jnp.arange(size))
        return carried + own @ (new - lost), found

    lowers = jnp.linalg.cholesky(diagonal_blocks(hessian, length))
    eyes = jnp.broadcast_to(jnp.eye(length), lowers.shape)
    halves = jax.scipy.linalg.solve_triangular(lowers, eyes, lower=True)
    inverses = halves.swapaxes(1, 2) @ halves
    delta = rows - decode_rows(codes, tables)
    found = jax.lax.scan(group, hessian @ delta, jnp.arange(blocks // size))[1]
    return found.reshape(blocks, stages, width).swapaxes(0, 1)
