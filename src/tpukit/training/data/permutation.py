"""A shuffle without a buffer: where an index goes is computed, for a whole batch at once.

Grain has the same idea (`MapDataset.shuffle`) one element at a time; at several microseconds an
element that costs more than reading the tokens does, so this one works on arrays.
"""

import math
from functools import lru_cache

import numpy as np

_ROUNDS = 6
LARGEST = 2**62


def permute(indices: np.ndarray, *, size: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Where each of `indices` goes in a permutation of range(size) drawn from (seed, epoch).

    An index is a place in a table hardly larger than `size`; in turn rows are shifted by what
    their column says and columns by what their row says (a Feistel network). Whoever lands
    outside walks on until inside, so that it stays a permutation; few do.

    Args:
        indices: One-dimensional, integers in range(size).
        size: How many there are in all, up to 2**62.
        seed: Any integer from 0.
        epoch: Each has a permutation of its own.
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = _round_keys(seed, epoch)
    found = _shift_in_turn(np.asarray(indices, np.int64), rows, columns, keys)
    outside = np.flatnonzero(found >= size)
    while outside.size:
        found[outside] = _shift_in_turn(found[outside], rows, columns, keys)
        outside = outside[found[outside] >= size]
    return found


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> np.ndarray:
    return np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint32)


def _shift_in_turn(values: np.ndarray, rows: int, columns: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of range(rows * columns)."""
    row, column = np.divmod(values, columns)
    for round_ in range(0, _ROUNDS, 2):
        row = (row + _scatter(column, keys[round_])) % rows
        column = (column + _scatter(row, keys[round_ + 1])) % columns
    return row * columns + column


def _scatter(values: np.ndarray, key: np.uint32) -> np.ndarray:
    """32 scattered bits for each value (the finaliser of MurmurHash3); products wrap around."""
    mixed = values.astype(np.uint32) ^ key
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed
