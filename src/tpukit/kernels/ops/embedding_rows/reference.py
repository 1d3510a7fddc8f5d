"""Looked-up rows in plain jnp, with the residuals that all implementations share."""

import jax
import jax.numpy as jnp

Residuals = tuple[jax.Array, jax.Array]


def forward(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, Residuals]:
    """`table[ids]`; the gradient needs the numbers, and the table's height and dtype."""
    # An empty cut of the table holds both.
    return table[ids], (ids, table[:, :0])


def backward(residuals: Residuals, cotangent: jax.Array) -> tuple[jax.Array, None]:
    """The gradient of the table: each token's added to its row."""
    ids, table = residuals
    at = row_numbers(ids, table.shape[0])
    nothing = jnp.zeros((table.shape[0], cotangent.shape[-1]), table.dtype)
    return nothing.at[at].add(cotangent.astype(table.dtype)), None


def row_numbers(ids: jax.Array, rows: int) -> jax.Array:
    """The rows that a lookup reads: it wraps numbers below zero and holds others at the ends."""
    return jnp.clip(jnp.where(ids < 0, ids + rows, ids), 0, rows - 1)
