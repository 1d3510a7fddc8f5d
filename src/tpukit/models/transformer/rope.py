"""Rotary positions of the reference models, which XLA fuses into its neighbours under any mesh."""

from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np

from ...kernels.ops.rope import frequencies as stretched
from ...kernels.ops.rope import reference
from ...kernels.ops.rope.tables import tables_at
from .config import RopeScaling


def rope_frequencies(
    head_dim: int, *, theta: float, scaling: RopeScaling | None = None
) -> np.ndarray:
    """Radians per position for each of the `head_dim / 2` channel pairs."""
    known = None if scaling is None else stretched.RopeScaling(**asdict(scaling))
    return stretched.rope_frequencies(head_dim, theta=theta, scaling=known)


def apply_rope(x: jax.Array, positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Turn channel pairs (i, i + head_dim / 2) of x (B, S, H, D) by their position's angle."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return reference.rope(x, *tables_at(positions, frequencies, dtype=wide))
