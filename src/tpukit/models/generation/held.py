"""What a cache holds of tokens: arrays as they are, or codes beside a few tokens in bfloat16.

A token's slot is its position modulo the slots. Units (heads, or one for all channels) lie side by
side: by themselves, heads of 64 channels would leave half of a TPU's tiles empty.
"""

from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ...hardware.cache_formats import CacheFormat
from .slots import positions_held, slots_of_prompts
from .token_codes import CacheBook, decode, encode

WIDE = jnp.bfloat16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WideSlots:
    """Tokens as they are (layers, rows, slots, units x width).

    Attributes:
        array: In the format of the cache.
        units: That lie side by side.
    """

    array: jax.Array
    units: int = field(metadata={"static": True})

    @classmethod
    def empty(cls, held: tuple[int, int, int], units: int, width: int, dtype: Any) -> "WideSlots":
        """Room for (layers, rows, slots)."""
        return cls(jnp.zeros((*held, units * width), dtype), units)

    def placed(self, place: Any, axis: str | None) -> "WideSlots":
        """The same in its place; `axis` is what units are."""
        return replace(self, array=_placed(self.array, place, axis, self.units))

    def fill(self, index: Any, tokens: jax.Array, lengths: jax.Array) -> "WideSlots":
        """Write what one layer's slots hold after prompts (rows, tokens, units, width)."""
        held = slots_of_prompts(tokens, lengths, slots=self.array.shape[2])
        return replace(self, array=_layer_set(self.array, index, held))

    def put(self, index: Any, token: jax.Array, positions: jax.Array) -> "WideSlots":
        """Write one token of each row (rows, units, width)."""
        return replace(self, array=_slot_set(self.array, index, token, positions))

    def read(self, index: Any, positions: jax.Array, dtype: Any) -> jax.Array:
        """One layer's slots (rows, slots, units, width), as wide as they are kept."""
        slots = self.array[index]
        return slots.reshape(*slots.shape[:2], self.units, -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NarrowSlots:
    """Tokens as codes and scales, and the first and newest ones in bfloat16 too.

    Attributes:
        codes: (layers, rows, slots, units x bytes).
        scales: (layers, rows, slots, units x scales), bfloat16.
        wide: (layers, rows, first + recent, units x width): a position below `first` has that
            place, and each of the newest its position modulo `recent` behind them. None where the
            format keeps none.
        book: A codebook whose arrays have a leading axis of layers; None for integers.
        format: Of the cache.
        units: That lie side by side.
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
        held: tuple[int, int, int],
        units: int,
        width: int,
        format: CacheFormat,
        book: CacheBook | None,
    ) -> "NarrowSlots":
        """Room for (layers, rows, slots)."""
        dtype = jnp.int8 if format.codes.name == "int8" else jnp.uint8
        scales = units * width // format.sharing(width)
        beside = (*held[:2], format.wide, units * width)
        return cls(
            jnp.zeros((*held, units * format.code_bytes(width)), dtype),
            jnp.zeros((*held, scales), jnp.bfloat16),
            jnp.zeros(beside, WIDE) if format.wide else None,
            book,
            format,
            units,
        )

    def placed(self, place: Any, axis: str | None) -> "NarrowSlots":
        """The same in its place; `axis` is what units are."""
        codes, scales, wide = jax.tree.map(
            lambda leaf: _placed(leaf, place, axis, self.units),
            (self.codes, self.scales, self.wide),
        )
        book = jax.tree.map(lambda leaf: place(leaf, *(None,) * leaf.ndim), self.book)
        return replace(self, codes=codes, scales=scales, wide=wide, book=book)

    def fill(self, index: Any, tokens: jax.Array, lengths: jax.Array) -> "NarrowSlots":
        """Write what one layer's slots hold after prompts (rows, tokens, units, width)."""
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

    def put(self, index: Any, token: jax.Array, positions: jax.Array) -> "NarrowSlots":
        """Write one token of each row (rows, units, width)."""
        codes, scales = encode(self.format, token, self._book_of(index))
        wide, format = self.wide, self.format
        if wide is not None and format.recent:
            wide = _place_set(wide, index, token, format.first + positions % format.recent)
        if wide is not None and format.first:
            # Past the first ones there is no such place, and nothing is written.
            places = jnp.where(positions < format.first, positions, format.wide)
            wide = _place_set(wide, index, token, places)
        return replace(
            self,
            codes=_slot_set(self.codes, index, codes, positions),
            scales=_slot_set(self.scales, index, scales, positions),
            wide=wide,
        )

    def read(self, index: Any, positions: jax.Array, dtype: Any) -> jax.Array:
        """One layer's slots (rows, slots, units, width) after the tokens at `positions`."""
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
        """(rows, places) the position of each token kept wide; negative where there is none."""
        places = jnp.arange(self.format.first)
        first = jnp.where(places <= positions[:, None], places, -1)
        if not self.format.recent:
            return first
        newest = positions_held(positions, self.format.recent)
        return jnp.concatenate([first, newest], axis=1)

    def _book_of(self, index: Any) -> CacheBook | None:
        return jax.tree.map(lambda leaf: leaf[index], self.book)


Held: TypeAlias = WideSlots | NarrowSlots


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
