"""Rows taken by index, whose gradient is taken by index too.

The gradient of indexing adds rows up where they came from. A TPU does that row after row, while
routing knows both ways: who took a row as well as which row was taken.
"""

import jax
from jax import Array


@jax.custom_vjp
def take_rows(rows: Array, indices: Array, takers: Array) -> Array:
    """Rows by index; an index past the end gives zeros and passes no gradient.

    Args:
        rows: (R, d).
        indices: Of any shape: which row goes there.
        takers: (R, n) where each row went, as positions in the flattened `indices`; past their end
            for fewer than n.

    Returns:
        (*indices.shape, d).
    """
    del takers
    return _take(rows, indices)


def _forward(rows: Array, indices: Array, takers: Array) -> tuple[Array, Array]:
    return _take(rows, indices), takers


def _backward(takers: Array, cotangent: Array) -> tuple[Array, None, None]:
    flat = cotangent.reshape(-1, cotangent.shape[-1])
    return _take(flat, takers).sum(1), None, None


def _take(rows: Array, indices: Array) -> Array:
    return rows.at[indices].get(mode="fill", fill_value=0)


take_rows.defvjp(_forward, _backward)


def reorder_rows(rows: Array, order: Array, inverse: Array) -> Array:
    """Rows in another order, given with its inverse."""
    return take_rows(rows, order, inverse[:, None])
