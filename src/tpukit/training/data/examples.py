"""Tokens cut into examples of one length, which are read by number."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from ...errors import TPUValidationError
from .indexed import Examples, IndexedData
from .stream import Batch, DataDescription
from .token_store import TokenStore


@dataclass(frozen=True, eq=False)
class Packing:
    """The pieces of documents in each row.

    Attributes:
        starts: First token of each piece; pieces are sorted by row.
        lengths: Number of inputs of each piece; the last target is one token further.
        row_offsets: Index of the first piece of each row, and the number of pieces at the end.
        row_length: Positions per row.
    """

    starts: np.ndarray
    lengths: np.ndarray
    row_offsets: np.ndarray
    row_length: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.row_offsets) - 1

    @property
    def filled(self) -> float:
        """Share of positions with a token; the rest is padding."""
        return float(self.lengths.sum()) / (self.num_rows * self.row_length)

    def pieces_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the pieces of these rows as arrays: index into `rows`, start, length."""
        first, last = self.row_offsets[rows], self.row_offsets[rows + 1]
        counts = last - first
        owner = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        pieces = first[owner] + within
        return owner, self.starts[pieces], self.lengths[pieces]


def pack_documents(documents: np.ndarray, row_length: int) -> Packing:
    """Pack documents, given by their offsets, into rows of `row_length` positions.

    The plan needs only the lengths, so row 7 is the same on every host and after every restart. It
    is best fit, longest first, on the histogram of lengths (Krell et al., "Efficient Sequence
    Packing without Cross-contamination", arXiv:2107.02027), so millions of documents take a few
    thousand distinct rows. A document of n tokens takes n - 1 positions, because each position
    predicts the next token; a longer one is cut into full rows and a rest. Rows are in the order
    of their earliest document.
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
    """Return starts and lengths of pieces of at most `row_length` positions."""
    first = np.asarray(documents[:-1], np.int64)
    positions = np.diff(np.asarray(documents, np.int64)) - 1
    first, positions = first[positions > 0], positions[positions > 0]
    pieces = -(-positions // row_length)
    owner = np.repeat(np.arange(len(first)), pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = first[owner] + number * row_length
    return starts, np.minimum(positions[owner] - number * row_length, row_length)


def _best_fit(lengths: np.ndarray, row_length: int) -> np.ndarray:
    """Return the row of each piece."""
    waiting = np.argsort(-lengths, kind="stable")  # longest first, then in order
    distinct, counts = np.unique(lengths[waiting], return_counts=True)
    # Rows that are not full yet: by free positions, their piece lengths and how many are alike.
    room = np.zeros(row_length + 1, np.int64)
    alike: defaultdict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left:
            fitting = np.flatnonzero(room[length:])
            if fitting.size:
                space = length + int(fitting[0])
                pieces, number = alike[space].pop()
            else:
                space, pieces, number = row_length, (), left
                room[space] += number
            used = min(left, number)
            if used < number:
                alike[space].append((pieces, number - used))
            room[space] -= used
            alike[space - length].append(((*pieces, length), used))
            room[space - length] += used
            left -= used
    return _assign(lengths, waiting, alike)


def _assign(
    lengths: np.ndarray,
    waiting: np.ndarray,
    alike: dict[int, list[tuple[tuple[int, ...], int]]],
) -> np.ndarray:
    """Assign to every planned row the next pieces of its lengths."""
    sorted_lengths = -lengths[waiting]
    cursor: dict[int, int] = {}
    rows = np.empty(len(lengths), np.int64)
    made = 0
    for space in sorted(alike):
        for pieces, number in alike[space]:
            numbers = np.arange(made, made + number)
            made += number
            for length in pieces:
                begin = cursor.get(length)
                if begin is None:
                    begin = int(np.searchsorted(sorted_lengths, -length))
                rows[waiting[begin : begin + number]] = numbers
                cursor[length] = begin + number
    return rows


IGNORED_TARGET = -1  # losses leave out positions with a negative target


class ConcatenatedExamples:
    """Documents one after another, cut every `sequence_length` tokens, without padding.

    Neighbours share one token: the last target of an example is the first input of the next one,
    so every token but the first is predicted once. An incomplete example at the end is dropped.
    """

    def __init__(self, store: TokenStore, sequence_length: int, vocab_size: int | None) -> None:
        self._store, self._length, self._vocab_size = store, sequence_length, vocab_size

    def __len__(self) -> int:
        return (self._store.num_tokens - 1) // self._length

    def read(self, numbers: np.ndarray) -> list[Batch]:
        """Return batches of inputs and targets (B, S) int32."""
        starts = (numbers.reshape(-1) * self._length).tolist()
        spans = self._store.read(starts, [start + self._length + 1 for start in starts])
        size = numbers.shape[1]
        return [
            self._batch(starts[at : at + size], spans[at : at + size])
            for at in range(0, len(spans), size)
        ]

    def _batch(self, starts: list[int], spans: list[np.ndarray]) -> Batch:
        inputs = np.empty((len(spans), self._length), np.int32)
        targets = np.empty_like(inputs)
        for row, tokens in enumerate(spans):
            inputs[row] = tokens[:-1]
            targets[row] = tokens[1:]
        check_vocabulary(inputs, self._store, self._vocab_size)
        check_vocabulary(targets[:, -1], self._store, self._vocab_size)
        for row, start in enumerate(starts):
            mask_unlearned(targets[row], self._store, start)
        return {"inputs": inputs, "targets": targets}


class DocumentExamples:
    """Documents packed side by side, separated by `segment_ids`; the rest is padding.

    A document longer than a sequence is cut, and each piece counts as a document.
    """

    def __init__(self, store: TokenStore, sequence_length: int, vocab_size: int | None) -> None:
        if store.documents is None:
            raise TPUValidationError(
                f"{store.path} does not record where documents start, but packing='documents' "
                "needs "
                "that. Prepare it with 'tpukit data prepare', or use packing='concat'."
            )
        self._store, self._length, self._vocab_size = store, sequence_length, vocab_size
        self.packing: Packing = pack_documents(store.documents, sequence_length)

    def __len__(self) -> int:
        return self.packing.num_rows

    def read(self, numbers: np.ndarray) -> list[Batch]:
        """Return inputs, targets, segment_ids and positions (B, S) int32; padding has target -1."""
        rows, starts, lengths = self.packing.pieces_of(numbers.reshape(-1))
        spans = self._store.read(starts.tolist(), (starts + lengths + 1).tolist())
        size = numbers.shape[1]
        ends = np.searchsorted(rows, np.arange(0, numbers.size + 1, size)).tolist()
        return [
            self._batch(
                size,
                (rows[begin:end] % size).tolist(),
                starts[begin:end].tolist(),
                spans[begin:end],
            )
            for begin, end in pairwise(ends)
        ]

    def _batch(
        self, size: int, rows: list[int], starts: list[int], spans: list[np.ndarray]
    ) -> Batch:
        shape = (size, self._length)
        inputs, segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(3))
        targets = np.full(shape, IGNORED_TARGET, np.int32)
        counting = np.arange(self._length, dtype=np.int32)
        previous, column, segment = -1, 0, 0
        places: list[tuple[int, slice, int]] = []
        for row, start, tokens in zip(rows, starts, spans, strict=True):
            if row != previous:
                previous, column, segment = row, 0, 0
            segment += 1
            end = column + len(tokens) - 1
            inputs[row, column:end] = tokens[:-1]
            targets[row, column:end] = tokens[1:]
            segment_ids[row, column:end] = segment
            positions[row, column:end] = counting[: end - column]
            places.append((row, slice(column, end), start))
            column = end
        check_vocabulary(inputs, self._store, self._vocab_size)
        check_vocabulary(np.where(segment_ids > 0, targets, 0), self._store, self._vocab_size)
        for row, place, start in places:
            mask_unlearned(targets[row, place], self._store, start)
        return {
            "inputs": inputs,
            "targets": targets,
            "segment_ids": segment_ids,
            "positions": positions,
        }


def mask_unlearned(targets: np.ndarray, store: TokenStore, start: int) -> None:
    """Set in place the targets that are not learned to -1; `start` is the first input's index."""
    learned = store.learned(start + 1, start + 1 + len(targets))
    if learned is not None:
        targets[~learned] = IGNORED_TARGET


def check_vocabulary(tokens: np.ndarray, store: TokenStore, vocab_size: int | None) -> None:
    """Refuse tokens outside the vocabulary, which an embedding would clip silently.

    Raises:
        TPUValidationError: A token is negative, or at least `vocab_size`.
    """
    if vocab_size is not None and (largest := int(tokens.max(initial=0))) >= vocab_size:
        raise vocabulary_overflow(store, largest, vocab_size)
    # As int32, unsigned tokens from 2**31 on are negative too.
    if store.dtype.itemsize > 2 and (smallest := int(tokens.min(initial=0))) < 0:
        raise TPUValidationError(
            f"{store.path} contains the token {smallest} when read as int32; expected 0 to "
            "2147483647. Its dtype may be another; give it with dtype=."
        )


def vocabulary_overflow(store: TokenStore, largest: int, vocab_size: int) -> TPUValidationError:
    """Return the error for a token without an embedding."""
    made_by = store.tokenizer.get("name")
    hint = f" It was made with the tokenizer '{made_by}'." if made_by else ""
    return TPUValidationError(
        f"{store.path} contains the token {largest}, but the model's vocabulary ends at "
        f"{vocab_size - 1} (vocab_size={vocab_size}).{hint} Prepare the data with the model's own "
        f"tokenizer, or give it at least {largest + 1} tokens (in a job file, "
        f"'model: {{preset: …, vocab_size: {largest + 1}}}')."
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredData(IndexedData):
    """Tokens as examples; see `IndexedData` for their order."""

    store: TokenStore
    sequence_length: int
    vocab_size: int | None
    packing: str

    @property
    def examples(self) -> Examples:
        """The examples."""
        return self._cut

    @cached_property
    def _cut(self) -> Examples:
        cut = DocumentExamples if self.packing == "documents" else ConcatenatedExamples
        return cut(self.store, self.sequence_length, self.vocab_size)

    @property
    def path(self) -> str:
        """Path of the tokens, for messages."""
        return self.store.path

    @property
    def example_size(self) -> int:
        """Tokens per example."""
        return self.sequence_length

    def describe(self) -> DataDescription:
        """Return a description of the data."""
        documents = self.store.documents
        examples = self.examples
        return DataDescription(
            kind=self.store.kind,
            path=self.store.path,
            num_tokens=self.store.num_tokens,
            num_examples=len(examples),
            num_documents=None if documents is None else len(documents) - 1,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            packing=self.packing,
            filled=examples.packing.filled if isinstance(examples, DocumentExamples) else 1.0,
            dtype=self.store.dtype.name,
            largest_token=self.store.largest_token,
            fingerprint=self.store.fingerprint,
        )

    def identity(self) -> dict[str, Any]:
        """Return the settings that a position depends on."""
        return {
            "kind": "tokens",
            "fingerprint": self.store.fingerprint,
            "sequence_length": self.sequence_length,
            "packing": self.packing,
        }
