"""The slots of a KV cache: tokens as arrays, or as codes and scales beside a few bfloat16 tokens.

A token's slot is its position modulo the number of slots. Units (heads, or one unit for all
channels) are stored side by side, because heads of 64 channels alone would leave half of a TPU's
tiles empty.

Quantized channels are rotated first by a Hadamard transform (`rotate`), so that all channels have
similar magnitudes. Queries are rotated too, which leaves their dot products with keys unchanged.
Attention outputs over rotated values are rotated back. No array of the cache's size is rotated.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from ...hardware.formats import INT4, INT8
from ...hardware.stored_formats import CacheFormat
from ...kernels.hadamard import hadamard
from ...kernels.rounding import absmax_scales, to_nearest

# Factors of the scale by the largest magnitude. A smaller scale clips few values and represents all
# others better; the factor with the least error is chosen.
_SHRUNK = (1.0, 0.92, 0.85, 0.78, 0.7)
_HALF = 7.5  # the 16 values of int4 codes are symmetric around zero: ±0.5, … ±7.5


# The rotation of queries, keys, values and latents where they are quantized.
Rotation: TypeAlias = Callable[[jax.Array], jax.Array]


def unrotated(x: jax.Array) -> jax.Array:
    """Return the array unchanged, for caches that are not quantized."""
    return x


class CacheBook(Protocol):
    """The part of a codebook's interface that a cache uses (`tpukit.quantization.Codebook`)."""

    @property
    def values(self) -> jax.Array:
        """Entries as float32 (stages, entries, length)."""
        ...

    def decode(self, codes: jax.Array) -> jax.Array:
        """Return the vectors (…, length) of codes (stages, …)."""
        ...


def rotate(x: jax.Array) -> jax.Array:
    """Return the Hadamard transform of the last axis, which is its own inverse."""
    return hadamard(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)


def encode(
    format: CacheFormat, x: jax.Array, book: CacheBook | None
) -> tuple[jax.Array, jax.Array]:
    """Return codes (…, bytes) and bfloat16 scales (…, scales) of units (…, width)."""
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
        # A scale that was rounded down would put the largest value outside of the format.
        codes = to_nearest(jnp.clip(scaled, -INT8.largest, INT8.largest), INT8)
        return codes.reshape(x.shape), scales
    assert format.codes is INT4
    codes, scales = _four_bits(blocks)
    low, high = jnp.split(codes.reshape(x.shape), 2, axis=-1)
    return low | (high << 4), scales


def decode(
    format: CacheFormat, codes: jax.Array, scales: jax.Array, book: CacheBook | None, dtype: Any
) -> jax.Array:
    """Return the units (…, width) of codes and scales."""
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
    """Return the RMS of the last axis in bfloat16, or 1 where all values are zero."""
    rms = jnp.sqrt(jnp.mean(blocks.astype(jnp.float32) ** 2, axis=-1)).astype(jnp.bfloat16)
    return jnp.where(rms == 0, jnp.ones_like(rms), rms)


def _four_bits(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return uint8 codes 0 … 15 of blocks (…, channels) and their scales of least error."""
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
    """Return the uint8 index (…,) of the nearest of at most 256 entries (entries, length)."""
    products = jnp.einsum("...d,kd->...k", vectors, entries, precision=jax.lax.Precision.HIGHEST)
    distances = jnp.sum(entries**2, axis=-1) - 2 * products
    return jnp.argmin(distances, axis=-1).astype(jnp.uint8)


WIDE = jnp.bfloat16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlainSlots:
    """Unquantized tokens (layers, rows, slots, units x width).

    Attributes:
        array: The tokens in the format of the cache.
        units: Units that are concatenated on the last axis.
    """

    array: jax.Array
    units: int = field(metadata={"static": True})

    @classmethod
    def empty(cls, sizes: tuple[int, int, int], units: int, width: int, dtype: Any) -> "PlainSlots":
        """Return empty slots of sizes (layers, rows, slots)."""
        return cls(jnp.zeros((*sizes, units * width), dtype), units)

    def placed(self, place: Any, axis: str | None) -> "PlainSlots":
        """Return the slots placed; `axis` is the name of the dimension of units."""
        return replace(self, array=_placed(self.array, place, axis, self.units))

    def fill(self, index: Any, tokens: jax.Array, lengths: jax.Array) -> "PlainSlots":
        """Return the slots with one layer's prompts (rows, tokens, units, width) written."""
        held = slots_of_prompts(tokens, lengths, slots=self.array.shape[2])
        return replace(self, array=_layer_set(self.array, index, held))

    def put(self, index: Any, token: jax.Array, positions: jax.Array) -> "PlainSlots":
        """Return the slots with one token per row (rows, units, width) written."""
        return replace(self, array=_slot_set(self.array, index, token, positions))

    def read(self, index: Any, positions: jax.Array, dtype: Any) -> jax.Array:
        """Return one layer's slots (rows, slots, units, width) in the cache's format."""
        slots = self.array[index]
        return slots.reshape(*slots.shape[:2], self.units, -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedSlots:
    """Tokens as codes and scales, with the first and newest tokens also in bfloat16.

    Attributes:
        codes: (layers, rows, slots, units x bytes).
        scales: (layers, rows, slots, units x scales), bfloat16.
        wide: (layers, rows, first + recent, units x width) tokens in bfloat16. Positions below
            `first` come first; the newest tokens follow at their position modulo `recent`. None
            where the format has no such tokens.
        book: A codebook whose arrays have a leading axis of layers; None for integers.
        format: The format of the cache.
        units: Units that are concatenated on the last axis.
    """

    codes: jax.Array
    scales: jax.Array
    wide: jax.Array | None
    book: CacheBook | None
    format: CacheFormat = field(metadata={"static": True})
    units: int = field(metadata={"static": True})

    @classmethod
    def empty(
        cls,
        sizes: tuple[int, int, int],
        units: int,
        width: int,
        format: CacheFormat,
        book: CacheBook | None,
    ) -> "QuantizedSlots":
        """Return empty slots of sizes (layers, rows, slots)."""
        dtype = jnp.int8 if format.codes.name == "int8" else jnp.uint8
        scales = units * width // format.sharing(width)
        wide = (*sizes[:2], format.wide, units * width)
        return cls(
            jnp.zeros((*sizes, units * format.code_bytes(width)), dtype),
            jnp.zeros((*sizes, scales), jnp.bfloat16),
            jnp.zeros(wide, WIDE) if format.wide else None,
            book,
            format,
            units,
        )

    def placed(self, place: Any, axis: str | None) -> "QuantizedSlots":
        """Return the slots placed; `axis` is the name of the dimension of units."""
        codes, scales, wide = jax.tree.map(
            lambda leaf: _placed(leaf, place, axis, self.units),
            (self.codes, self.scales, self.wide),
        )
        book = jax.tree.map(lambda leaf: place(leaf, *(None,) * leaf.ndim), self.book)
        return replace(self, codes=codes, scales=scales, wide=wide, book=book)

    def fill(self, index: Any, tokens: jax.Array, lengths: jax.Array) -> "QuantizedSlots":
        """Return the slots with one layer's prompts (rows, tokens, units, width) written."""
        held = slots_of_prompts(tokens, lengths, slots=self.codes.shape[2])
        codes, scales = encode(self.format, held, self._book_of(index))
        wide = self.wide
        if wide is not None:
            where = jnp.clip(self._positions_wide(lengths - 1), 0, tokens.shape[1] - 1)
            beside = jnp.take_along_axis(tokens, where[..., None, None], axis=1)
            wide = _layer_set(wide, index, beside)
        return replace(
            self,
            codes=_layer_set(self.codes, index, codes),
            scales=_layer_set(self.scales, index, scales),
            wide=wide,
        )

    def put(self, index: Any, token: jax.Array, positions: jax.Array) -> "QuantizedSlots":
        """Return the slots with one token per row (rows, units, width) written."""
        codes, scales = encode(self.format, token, self._book_of(index))
        wide, format = self.wide, self.format
        if wide is not None and format.recent:
            wide = _place_set(wide, index, token, format.first + positions % format.recent)
        if wide is not None and format.first:
            # The index of later positions is out of range, so nothing is written.
            places = jnp.where(positions < format.first, positions, format.wide)
            wide = _place_set(wide, index, token, places)
        return replace(
            self,
            codes=_slot_set(self.codes, index, codes, positions),
            scales=_slot_set(self.scales, index, scales, positions),
            wide=wide,
        )

    def read(self, index: Any, positions: jax.Array, dtype: Any) -> jax.Array:
        """Return one layer's slots (rows, slots, units, width) after the tokens at `positions`."""
        codes, scales = (self._of_layer(leaf, index) for leaf in (self.codes, self.scales))
        found = decode(self.format, codes, scales, self._book_of(index), dtype)
        if self.wide is None:
            return found
        held, slots = self._positions_wide(positions), found.shape[1]
        still = (held >= 0) & (held > positions[:, None] - slots)
        places = jnp.where(still, held % slots, slots)
        rows = jnp.arange(found.shape[0])[:, None]
        beside = self._of_layer(self.wide, index).astype(dtype)
        return found.at[rows, places].set(beside, mode="drop")

    def _of_layer(self, leaf: jax.Array, index: Any) -> jax.Array:
        return leaf[index].reshape(*leaf.shape[1:3], self.units, -1)

    def _positions_wide(self, positions: jax.Array) -> jax.Array:
        """Return (rows, places) positions of the bfloat16 tokens; negative for empty places."""
        places = jnp.arange(self.format.first)
        first = jnp.where(places <= positions[:, None], places, -1)
        if not self.format.recent:
            return first
        newest = positions_held(positions, self.format.recent)
        return jnp.concatenate([first, newest], axis=1)

    def _book_of(self, index: Any) -> CacheBook | None:
        return jax.tree.map(lambda leaf: leaf[index], self.book)


def positions_held(positions: jax.Array, slots: int) -> jax.Array:
    """Return (rows, slots) positions of the tokens in slots; negative for empty slots.

    Args:
        positions: (rows,) position of the newest token of each row.
        slots: The number of slots; a token's slot is its position modulo this.
    """
    behind = (positions[:, None] - jnp.arange(slots)) % slots
    return positions[:, None] - behind


def slots_of_prompts(tokens: jax.Array, lengths: jax.Array, *, slots: int) -> jax.Array:
    """Return slots (rows, slots, …) with the tokens (rows, tokens, …) of prompts."""
    held = positions_held(lengths - 1, slots)
    where = jnp.clip(held, 0, tokens.shape[1] - 1)
    shape = (*where.shape, *(1,) * (tokens.ndim - 2))
    return jnp.take_along_axis(tokens, where.reshape(shape), axis=1)


CacheSlots: TypeAlias = PlainSlots | QuantizedSlots


def _placed(leaf: jax.Array, place: Any, axis: str | None, units: int) -> Any:
    return place(leaf, None, "batch", None, axis, units=(*leaf.shape[:-1], units))


def _layer_set(array: jax.Array, index: Any, new: jax.Array) -> jax.Array:
    flat = new.reshape(*new.shape[:2], -1).astype(array.dtype)
    return jax.lax.dynamic_update_index_in_dim(array, flat, index, axis=0)


def _slot_set(array: jax.Array, index: Any, token: jax.Array, positions: jax.Array) -> jax.Array:
    return _place_set(array, index, token, positions % array.shape[2])


def _place_set(array: jax.Array, index: Any, token: jax.Array, places: jax.Array) -> jax.Array:
    rows = jnp.arange(token.shape[0])
    flat = token.reshape(token.shape[0], -1).astype(array.dtype)
    return array.at[index, rows, places].set(flat, mode="drop")
