"""`rope`: rotary positions from tables, their frequencies, and the published context extensions.

Channel pairs are (i, i + D / 2), as in the Llama checkpoints. XLA computes the rotation and fuses
it with its neighbours.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import TPUKernelError
from ...rotary import RopeScaling

KEPT_TABLES = 16
Table = jax.Array | np.ndarray


def rope(x: jax.Array, cos: Table, sin: Table) -> jax.Array:
    """Rotate channel pairs (i, i + D / 2) of x by the angles of `rope_tables`.

    Args:
        x: (B, S, H, D) queries or keys.
        cos: (S, D / 2), or (B, S, D / 2) where each row has its own positions.
        sin: The same. Tables have no gradient.

    Raises:
        TPUKernelError: The tables have another shape than x needs.
    """
    wanted = (x.shape[1], x.shape[-1] // 2)
    if x.ndim != 4 or any(
        table.shape not in (wanted, (x.shape[0], *wanted)) for table in (cos, sin)
    ):
        raise TPUKernelError(
            f"rope of x {x.shape} takes tables of the shape {wanted} or {(x.shape[0], *wanted)}, "
            f"but got {cos.shape} and {sin.shape}; x is (B, S, H, D)."
        )
    with jax.named_scope("rope"):
        return rotate(x, *(jax.lax.stop_gradient(table) for table in (cos, sin)))


def rotate(x: jax.Array, cos: Table, sin: Table) -> jax.Array:
    """Rotate x (B, S, H, D) by tables of ((B,) S, D / 2), computed in float32 or wider."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = (jnp.asarray(table, wide)[..., None, :] for table in (cos, sin))
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


class RopeTables(NamedTuple):
    """Cosines and sines, (length, head_dim / 2) or (batch, length, head_dim / 2)."""

    cos: jax.Array | np.ndarray
    sin: jax.Array | np.ndarray


@lru_cache(maxsize=KEPT_TABLES)
def rope_tables(
    length: int, head_dim: int, *, theta: float = 10000.0, scaling: RopeScaling | None = None
) -> RopeTables:
    """Return the float32 tables of positions 0 … length - 1; equal calls return the same arrays.

    Angles are exact to float64: at a position of 100,000 a float32 angle would be off by a
    hundredth of a radian. Pass the tables to a jitted function as arguments, so that a long one
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
    """Return the tables of traced positions, (…, S) -> (…, S, head_dim / 2)."""
    wide = dtype or jnp.dtype(jnp.float32)
    angles = positions[..., None].astype(wide) * jnp.asarray(frequencies, wide)
    return RopeTables(jnp.cos(angles), jnp.sin(angles))


def rope_frequencies(
    head_dim: int,
    *,
    theta: float,
    scaling: RopeScaling | None = None,
    length: int | None = None,
) -> np.ndarray:
    """Return radians per position for each of the `head_dim / 2` channel pairs, in float64.

    Args:
        head_dim: Channels of a head.
        theta: The base.
        scaling: How to extend the context; None does not.
        length: Sequence length, which dynamic and longrope scaling depend on.

    Raises:
        TPUKernelError: The head has an odd number of channels, or a length is missing.
    """
    if head_dim % 2:
        raise TPUKernelError(
            f"RoPE rotates pairs of channels, but the head has {head_dim}; it must be even."
        )
    if scaling is not None and scaling.kind == "dynamic":
        theta = _raised_base(head_dim, theta, scaling, length)
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "longrope":
        return frequencies / _own_factors(head_dim, scaling, length)
    if scaling.kind == "yarn":
        kept = _kept_by_turns(head_dim, theta, scaling)
    else:
        kept = _kept_by_wavelength(frequencies, scaling)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _own_factors(head_dim: int, scaling: RopeScaling, length: int | None) -> np.ndarray:
    long = length is not None and length > scaling.original_max_seq_len
    factors = scaling.long_factors if long else scaling.short_factors
    if len(factors) != head_dim // 2:
        raise TPUKernelError(
            f"longrope has {len(factors)} factors for heads of {head_dim} rotated channels; give "
            f"{head_dim // 2}, one for each pair."
        )
    return np.asarray(factors, np.float64)


def _raised_base(head_dim: int, theta: float, scaling: RopeScaling, length: int | None) -> float:
    if length is None:
        raise TPUKernelError(
            "Dynamic RoPE scaling depends on the length of the sequence, but none was given; give "
            "length=, or use linear, llama3 or yarn."
        )
    longer = max(length, scaling.original_max_seq_len) / scaling.original_max_seq_len
    return theta * (scaling.factor * longer - (scaling.factor - 1)) ** (head_dim / (head_dim - 2))


def _kept_by_wavelength(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Return 1 for frequencies to keep, 0 for those to divide, linear in rotations between them."""
    rotations = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    # With equal factors there is nothing to blend: a frequency is kept or divided.
    spread = max(scaling.high_freq_factor - scaling.low_freq_factor, 1e-9)
    return np.clip((rotations - scaling.low_freq_factor) / spread, 0.0, 1.0)


def _kept_by_turns(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Return the ramp of the YaRN paper, over channel numbers rounded outwards."""

    def channel(rotations: float) -> float:
        wavelength = scaling.original_max_seq_len / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    channels = np.arange(head_dim // 2, dtype=np.float64)
    return 1 - np.clip((channels - first) / max(last - first, 1e-3), 0.0, 1.0)
