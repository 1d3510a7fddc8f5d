"""Turning by tables in plain jnp, in the half-split convention of the Llama checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np

Table = jax.Array | np.ndarray


def rope(x: jax.Array, cos: Table, sin: Table) -> jax.Array:
    """Turn channel pairs (i, i + D / 2) of x (B, S, H, D) by tables of ((B,) S, D / 2)."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = (jnp.asarray(table, wide)[..., None, :] for table in (cos, sin))
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def forward(
    x: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The result, and the tables as residuals."""
    return rope(x, cos, sin), (cos, sin)


def backward(
    residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, None, None]:
    """A rotation is undone by its opposite; tables are data and have no gradient."""
    cos, sin = residuals
    return rope(cotangent, cos, -sin), None, None
