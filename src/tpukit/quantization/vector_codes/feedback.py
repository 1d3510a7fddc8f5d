"""Error feedback: what rounding a few rows loses is made good in the rows still to come.

With H = XᵀX of a layer's inputs and H⁻¹ = UᵀU (U upper), rounding rows s of a column leaves the
error |U_ss⁻ᵀ·(w − q)|² once later rows are moved by their best answer, −U_s,restᵀ·U_ss⁻ᵀ·(w − q).
So each block of `length` rows takes the entry that is nearest in that measure (GPTVQ takes the
diagonal of it), then the rows below move. Rows move at once within a group, and by one product
for all groups below.
"""

from functools import partial

import jax
import jax.numpy as jnp

from .choice import CodeChoice, decode_rows

_GROUP_ROWS = 128


def group_blocks(blocks: int, length: int) -> int:
    """How many blocks make a group: the most, up to 128 rows, that divides them."""
    most = max(1, _GROUP_ROWS // length)
    return next(size for size in range(min(most, blocks), 0, -1) if blocks % size == 0)


def diagonal_blocks(matrix: jax.Array, length: int) -> jax.Array:
    """(blocks, length, length): the squares on the diagonal of (in, in)."""
    blocks = matrix.shape[0] // length
    number = jnp.arange(blocks)
    return matrix.reshape(blocks, length, blocks, length)[number, :, number]


@jax.jit
def inverse_factor(hessian: jax.Array) -> jax.Array:
    """The upper U with H⁻¹ = UᵀU."""
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
    """int32 codes (stages, blocks, out) of (in, out) rows.

    Args:
        rows: float32, `in` a multiple of length.
        factor: (in, in), from `inverse_factor`.
        squares: (out,): how much a column counts.
        tables: float32 (stages, entries, length).
        choice: Who chooses codes.
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
