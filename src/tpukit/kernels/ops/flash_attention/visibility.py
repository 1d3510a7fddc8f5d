"""Which keys a query attends to, and so which blocks of scores are computed, masked or skipped."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .spec import AttentionSpec, BlockMask

# Positions are traced inside kernels, and plain integers where they shape a grid.
Position = int | Any


class Span(NamedTuple):
    """Blocks from `first` up to `end`; those from `full_first` up to `full_end` need no mask."""

    first: Position
    full_first: Position
    full_end: Position
    end: Position


@dataclass(frozen=True)
class Visibility:
    """Which keys j a query i attends to; both count from 0, as in `jax.nn.dot_product_attention`.

    Attributes:
        q_len: Number of queries.
        kv_len: Number of keys.
        spec: The attention, without chunks and arrays.
        key_offset: Position of the first key, in a part of a problem with a symmetric window.
    """

    q_len: int
    kv_len: int
    spec: AttentionSpec
    key_offset: int = 0

    @property
    def causal(self) -> bool:
        """Whether only keys j <= i are visible."""
        return self.spec.causal

    @property
    def window(self) -> int | None:
        """Only keys with |i - j| < window are visible."""
        return self.spec.window

    @property
    def mask(self) -> BlockMask | None:
        """Further blocks to leave out."""
        return self.spec.mask

    @property
    def padding_is_visible(self) -> bool:
        """Whether queries would attend to padding after the last key without a mask."""
        return not (self.causal and self.q_len <= self.kv_len)

    @property
    def symmetric(self) -> bool:
        """Whether a window extends as far after a query as before it."""
        return self.window is not None and not self.causal

    def distance(self, row: Position, column: Position) -> Position:
        """Return how many tokens query `row` is after key `column`."""
        return row - column - self.key_offset if self.key_offset else row - column

    def keys_of(self, row: Position, rows: int, *, block: int) -> Span:
        """Return the blocks of keys that queries `row` up to `row + rows` attend to."""
        end, full_end = self.kv_len, self.kv_len
        first: Position = 0
        full_first: Position = 0
        row = row - self.key_offset if self.key_offset else row
        if self.causal:
            end, full_end = minimum(end, row + rows), minimum(full_end, row + 1)
        if self.window is not None:
            first = maximum(0, row - self.window + 1)
            full_first = maximum(0, row + rows - self.window)
            if self.symmetric:
                end = maximum(0, minimum(end, row + rows + self.window - 1))
                full_end = maximum(0, minimum(full_end, row + self.window))
        return _blocks(first, full_first, full_end, end, block)

    def queries_of(self, column: Position, columns: int, *, block: int) -> Span:
        """Return the blocks of queries that attend to any of `columns` keys from `column` on."""
        first: Position = 0
        full_first: Position = 0
        end: Position = self.q_len
        full_end: Position = ceil_div(self.q_len, block) * block
        key = column + self.key_offset if self.key_offset else column
        if self.causal:
            first, full_first = minimum(end, key), key + columns - 1
        if self.window is not None:
            end = minimum(end, key + columns + self.window - 1)
            full_end = minimum(full_end, key + self.window)
            if self.symmetric:
                first = minimum(end, maximum(0, key - self.window + 1))
                full_first = maximum(0, key + columns - self.window)
        if self.padding_is_visible:
            full_end = choose(column + columns > self.kv_len, 0, full_end)
        return _blocks(first, full_first, full_end, end, block)

    def token_mask(self, dtype: Any = bool) -> np.ndarray:
        """Return the full (q_len, kv_len) mask, for references and tests."""
        rows, columns = np.arange(self.q_len)[:, None], np.arange(self.kv_len)[None, :]
        visible = self.spec.allows(rows - self.key_offset, columns)
        if self.mask is not None:
            visible = visible & self.mask.allows(rows, columns)
        return visible.astype(dtype)


def _blocks(
    first: Position, full_first: Position, full_end: Position, end: Position, block: int
) -> Span:
    """Convert token positions to blocks, in order."""
    stop = ceil_div(end, block)
    begin = minimum(floor_div(first, block), stop)
    inner = minimum(maximum(ceil_div(full_first, block), begin), stop)
    outer = minimum(maximum(floor_div(full_end, block), inner), stop)
    return Span(begin, inner, outer, stop)


def minimum(a: Position, b: Position) -> Position:
    """Return the smaller of two integers or traced scalars."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def maximum(a: Position, b: Position) -> Position:
    """Return the larger of two integers or traced scalars."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def choose(condition: Any, yes: Position, no: Position) -> Position:
    """Return `yes` if the condition holds, else `no`, for integers or traced scalars."""
    return (
        (yes if condition else no) if isinstance(condition, bool) else jnp.where(condition, yes, no)
    )


def floor_div(a: Position, b: int) -> Position:
    """Divide a position, which is never negative, so that no code rounds towards -inf."""
    return a // b if isinstance(a, int) else jax.lax.div(a, jnp.int32(b))


def ceil_div(a: Position, b: int) -> Position:
    """Divide and round up."""
    return floor_div(a + b - 1, b)
