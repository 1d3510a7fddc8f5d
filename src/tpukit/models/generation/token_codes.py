"""Channels of a token as codes and scales, and back: integers, or entries of a codebook.

What comes here was turned by a Hadamard transform (`turned`), so that channels are alike. Queries
are turned too, which leaves their products with keys as they were, and what attention makes of
turned values is turned back: nothing of the size of the cache ever is.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ...hardware.cache_formats import CacheFormat
from ...hardware.formats import INT4, INT8
from ...kernels.hadamard import hadamard
from ...kernels.rounding import absmax_scales, to_nearest

# Of the scale by the largest magnitude: a smaller one clips few values and serves all others
# better. The one with the least error is taken.
_SHRUNK = (1.0, 0.92, 0.85, 0.78, 0.7)
_HALF = 7.5  # the 16 values of four bits lie evenly around zero: ±0.5, … ±7.5


class CacheBook(Protocol):
    """What is needed of a codebook (`tpukit.quantization.Codebook`)."""

    @property
    def values(self) -> jax.Array:
        """Entries as float32 (stages, entries, length)."""
        ...

    def decode(self, codes: jax.Array) -> jax.Array:
        """The vectors (…, length) of codes (stages, …)."""
        ...


def turned(x: jax.Array) -> jax.Array:
    """The last axis through the Hadamard transform; twice, it is x again but for rounding."""
    return hadamard(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)


def encode(
    format: CacheFormat, x: jax.Array, book: CacheBook | None
) -> tuple[jax.Array, jax.Array]:
    """Codes (…, bytes) and scales (…, scales), bfloat16, of units (…, width)."""
    wide = x.astype(jnp.float32)
    blocks = wide.reshape(*x.shape[:-1], -1, format.sharing(x.shape[-1]))
    if book is not None:
        scales = root_mean_squares(blocks)
        vectors = (blocks / scales[..., None].astype(jnp.float32)).reshape(
            *x.shape[:-1], -1, format.group
        )
        return _nearest(vectors, book.values[0]), scales
    if format.codes is INT8:
        scales = absmax_scales(blocks, INT8, axis=-1)[..., 0].astype(jnp.bfloat16)
        scaled = blocks / scales[..., None].astype(jnp.float32)
        # A scale rounded down takes the largest value past the format's.
        codes = to_nearest(jnp.clip(scaled, -INT8.largest, INT8.largest), INT8)
        return codes.reshape(x.shape), scales
    assert format.codes is INT4
    codes, scales = _four_bits(blocks)
    low, high = jnp.split(codes.reshape(x.shape), 2, axis=-1)
    return low | (high << 4), scales


def decode(
    format: CacheFormat, codes: jax.Array, scales: jax.Array, book: CacheBook | None, dtype: Any
) -> jax.Array:
    """The units (…, width) that codes and scales stand for."""
    if book is not None:
        values = book.decode(codes[None]).reshape(*codes.shape[:-1], -1)
    elif format.codes is INT8:
        values = codes.astype(jnp.float32)
    else:
        nibbles = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
        values = nibbles.astype(jnp.float32) - _HALF
    blocks = values.reshape(*scales.shape, -1) * scales[..., None].astype(jnp.float32)
    return blocks.reshape(values.shape).astype(dtype)


def root_mean_squares(blocks: jax.Array) -> jax.Array:
    """Of the last axis, in bfloat16; 1 where there is nothing but zeros."""
    found = jnp.sqrt(jnp.mean(blocks.astype(jnp.float32) ** 2, axis=-1)).astype(jnp.bfloat16)
    return jnp.where(found == 0, jnp.ones_like(found), found)


def _four_bits(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """uint8 codes 0 … 15 of blocks (…, channels), and the scale of each, by the least error."""
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / _HALF
    largest = jnp.where(largest == 0, 1.0, largest)
    best: tuple[Any, Any, Any] | None = None
    for share in _SHRUNK:
        scales = (largest * share).astype(jnp.bfloat16)
        wide = scales.astype(jnp.float32)
        codes = jnp.clip(jnp.round(blocks / wide + _HALF), 0, 15)
        lost = jnp.sum(((codes - _HALF) * wide - blocks) ** 2, axis=-1, keepdims=True)
        if best is None:
            best = lost, codes, scales
        else:
            new = lost < best[0]
            both = zip((lost, codes, scales), best, strict=True)
            best = tuple(jnp.where(new, one, old) for one, old in both)  # pyright: ignore[reportAssignmentType]
    assert best is not None
    return best[1].astype(jnp.uint8), best[2][..., 0]


def _nearest(vectors: jax.Array, entries: jax.Array) -> jax.Array:
    """uint8 (…,) the nearest of at most 256 entries (entries, length)."""
    products = jnp.einsum("...d,kd->...k", vectors, entries, precision=jax.lax.Precision.HIGHEST)
    distances = jnp.sum(entries**2, axis=-1) - 2 * products
    return jnp.argmin(distances, axis=-1).astype(jnp.uint8)
