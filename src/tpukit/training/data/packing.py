"""Documents packed into rows of one length, planned from their lengths alone, before any is read.

Best fit, longest first, on the histogram of lengths instead of on the documents (after Krell et
al., "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027): the plan of
millions of documents is made of few thousand distinct rows. Because the plan is fixed, row 7 is
row 7 on every host and after every restart.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Packing:
    """Which pieces of documents each row holds.

    Attributes:
        starts: First token of each piece; pieces are sorted by row.
        lengths: Inputs each piece has; the target of the last one is one token further.
        row_offsets: Where the pieces of each row start, and at the end the number of pieces.
        row_length: Places in a row.
    """

    starts: np.ndarray
    lengths: np.ndarray
    row_offsets: np.ndarray
    row_length: int

    @property
    def num_rows(self) -> int:
        """Rows in all."""
        return len(self.row_offsets) - 1

    @property
    def filled(self) -> float:
        """Share of all positions that hold a token; the rest is padding."""
        return float(self.lengths.sum()) / (self.num_rows * self.row_length)

    def pieces_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pieces of these rows: each one's row (counted from 0 in `rows`), start, length."""
        first, last = self.row_offsets[rows], self.row_offsets[rows + 1]
        counts = last - first
        owner = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        pieces = first[owner] + within
        return owner, self.starts[pieces], self.lengths[pieces]


def pack_documents(documents: np.ndarray, row_length: int) -> Packing:
    """Plan rows of `row_length` positions for documents given by their offsets.

    A document of n tokens takes n - 1 positions (each predicts the next token); a longer one is cut
    into full rows and a rest. Rows are in the order of the earliest document they hold.
    """
    starts, lengths = _cut(documents, row_length)
    rows = _best_fit(lengths, row_length)
    num_rows = int(rows.max()) + 1 if len(rows) else 0
    earliest = np.full(num_rows, np.iinfo(np.int64).max)
    np.minimum.at(earliest, rows, starts)
    rank = np.empty(num_rows, np.int64)
    rank[np.argsort(earliest, kind="stable")] = np.arange(num_rows)
    rows = rank[rows]
    order = np.lexsort((starts, rows))
    offsets = np.searchsorted(rows[order], np.arange(num_rows + 1))
    return Packing(starts[order], lengths[order], offsets, row_length)


def _cut(documents: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of pieces of at most `row_length` positions."""
    first = np.asarray(documents[:-1], np.int64)
    positions = np.diff(np.asarray(documents, np.int64)) - 1
    first, positions = first[positions > 0], positions[positions > 0]
    pieces = -(-positions // row_length)
    owner = np.repeat(np.arange(len(first)), pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = first[owner] + number * row_length
    return starts, np.minimum(positions[owner] - number * row_length, row_length)


def _best_fit(lengths: np.ndarray, row_length: int) -> np.ndarray:
    """The row of each piece."""
    waiting = np.argsort(-lengths, kind="stable")  # longest first, then in order
    distinct, counts = np.unique(lengths[waiting], return_counts=True)
    # Rows not yet full: by the room they have, what they hold and how many are alike.
    room = np.zeros(row_length + 1, np.int64)
    alike: defaultdict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left:
            fitting = np.flatnonzero(room[length:])
            if fitting.size:
                space = length + int(fitting[0])
                held, number = alike[space].pop()
            else:
                space, held, number = row_length, (), left
                room[space] += number
            used = min(left, number)
            if used < number:
                alike[space].append((held, number - used))
            room[space] -= used
            alike[space - length].append(((*held, length), used))
            room[space - length] += used
            left -= used
    return _assign(lengths, waiting, alike)


def _assign(
    lengths: np.ndarray,
    waiting: np.ndarray,
    alike: dict[int, list[tuple[tuple[int, ...], int]]],
) -> np.ndarray:
    """Give every planned row the next pieces of the lengths it holds."""
    sorted_lengths = -lengths[waiting]
    cursor: dict[int, int] = {}
    rows = np.empty(len(lengths), np.int64)
    made = 0
    for space in sorted(alike):
        for held, number in alike[space]:
            numbers = np.arange(made, made + number)
            made += number
            for length in held:
                begin = cursor.get(length)
                if begin is None:
                    begin = int(np.searchsorted(sorted_lengths, -length))
                rows[waiting[begin : begin + number]] = numbers
                cursor[length] = begin + number
    return rows
