"""Rotary positions in the half-split convention of the Llama checkpoints."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from .transformer_config import RopeScaling


def rope_frequencies(
    head_dim: int, *, theta: float, scaling: RopeScaling | None = None
) -> np.ndarray:
    """Radians per position for each of the `head_dim / 2` channel pairs."""
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaling.original_max_seq_len / scaling.high_freq_factor
    shortest_scaled = scaling.original_max_seq_len / scaling.low_freq_factor
    blend = (scaling.original_max_seq_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return np.where(
        wavelengths < longest_kept,
        frequencies,
        np.where(wavelengths > shortest_scaled, frequencies / scaling.factor, blended),
    )


def apply_rope(x: jax.Array, positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Turn channel pairs (i, i + head_dim / 2) of x (B, S, H, D) by their position's angle."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    angles = positions[..., None].astype(wide) * jnp.asarray(frequencies, wide)  # (B, S, D/2)
    sin, cos = jnp.sin(angles)[..., None, :], jnp.cos(angles)[..., None, :]
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
