"""Turning and taking apart in plain jnp, with the residuals that all implementations share."""

import jax
import jax.numpy as jnp

from ..rope import reference

Heads = tuple[int, int]  # of queries and keys


def forward(
    joined: jax.Array, cos: jax.Array, sin: jax.Array, *, heads: Heads
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Queries and keys, and the tables as residuals."""
    every = joined.reshape(*joined.shape[:2], sum(heads), -1)
    rotated = reference.rope(every, cos, sin)
    return (rotated[:, :, : heads[0]], rotated[:, :, heads[0] :]), (cos, sin)


def backward(
    residuals: tuple[jax.Array, jax.Array],
    cotangent: tuple[jax.Array, jax.Array],
    *,
    heads: Heads,
) -> tuple[jax.Array, None, None]:
    """The gradient of both, side by side; tables are data and have none."""
    cos, sin = residuals
    rotated = reference.rope(jnp.concatenate(cotangent, axis=2), cos, -sin)
    return rotated.reshape(*rotated.shape[:2], -1), None, None
