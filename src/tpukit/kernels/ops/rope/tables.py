"""Sines and cosines of every position: computed once on the host in float64, then kept."""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....rotary import RopeScaling
from .frequencies import rope_frequencies

KEPT_TABLES = 16


class RopeTables(NamedTuple):
    """Cosines and sines, (length, head_dim / 2) or (batch, length, head_dim / 2)."""

    cos: jax.Array | np.ndarray
    sin: jax.Array | np.ndarray


@lru_cache(maxsize=KEPT_TABLES)
def rope_tables(
    length: int, head_dim: int, *, theta: float = 10000.0, scaling: RopeScaling | None = None
) -> RopeTables:
    """The tables of positions 0 … length - 1, float32; the same call gives the same arrays.

    Angles are exact to float64: at a position of 100,000 a float32 angle would be off by a
    hundredth of a radian. Give the tables to a jitted function as arguments, so that a long one
    does not become a constant of the program.
    """
    frequencies = rope_frequencies(head_dim, theta=theta, scaling=scaling, length=length)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    scale = 1.0 if scaling is None else scaling.table_scale
    tables = [(scale * function(angles)).astype(np.float32) for function in (np.cos, np.sin)]
    for table in tables:
        table.flags.writeable = False  # shared by every caller
    return RopeTables(*tables)


def tables_at(
    positions: jax.Array, frequencies: np.ndarray, *, dtype: jnp.dtype | None = None
) -> RopeTables:
    """The tables of positions that only the program knows, (…, S) -> (…, S, head_dim / 2)."""
    wide = dtype or jnp.dtype(jnp.float32)
    angles = positions[..., None].astype(wide) * jnp.asarray(frequencies, wide)
    return RopeTables(jnp.cos(angles), jnp.sin(angles))
