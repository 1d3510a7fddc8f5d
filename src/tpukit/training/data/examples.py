"""Tokens cut into examples of one length: batches by number, in any order."""

from itertools import pairwise

import numpy as np

from ...errors import TPUValidationError
from .packing import Packing, pack_documents
from .stream import Batch
from .token_store import TokenStore

IGNORED_TARGET = -1  # losses leave out positions with a negative target


class ConcatenatedExamples:
    """Documents one after another, cut every `sequence_length` tokens; nothing is padded.

    Neighbours share one token: the last target of one is the first input of the next, so that
    every token but the first is predicted once. What is left at the end is not used.
    """

    def __init__(self, store: TokenStore, sequence_length: int, vocab_size: int | None) -> None:
        self._store, self._length, self._vocab_size = store, sequence_length, vocab_size

    def __len__(self) -> int:
        return (self._store.num_tokens - 1) // self._length

    def read(self, numbers: np.ndarray) -> list[Batch]:
        """Inputs and targets (B, S) int32."""
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
            leave_out(targets[row], self._store, start)
        return {"inputs": inputs, "targets": targets}


class DocumentExamples:
    """Whole documents packed side by side, kept apart by `segment_ids`; the rest is padding.

    A document longer than a sequence is cut; its pieces are documents of their own.
    """

    def __init__(self, store: TokenStore, sequence_length: int, vocab_size: int | None) -> None:
        if store.documents is None:
            raise TPUValidationError(
                f"{store.path} does not say where documents start, and packing='documents' needs "
                "that. Make it with 'tpukit data prepare', or use packing='concat'."
            )
        self._store, self._length, self._vocab_size = store, sequence_length, vocab_size
        self.packing: Packing = pack_documents(store.documents, sequence_length)

    def __len__(self) -> int:
        return self.packing.num_rows

    def read(self, numbers: np.ndarray) -> list[Batch]:
        """Inputs, targets, segment_ids and positions (B, S) int32; padding has target -1."""
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
            leave_out(targets[row, place], self._store, start)
        return {
            "inputs": inputs,
            "targets": targets,
            "segment_ids": segment_ids,
            "positions": positions,
        }


def leave_out(targets: np.ndarray, store: TokenStore, start: int) -> None:
    """Ignore, in place, the targets that are not to be predicted; `start` is the first input's."""
    learnt = store.learnt(start + 1, start + 1 + len(targets))
    if learnt is not None:
        targets[~learnt] = IGNORED_TARGET


def check_vocabulary(tokens: np.ndarray, store: TokenStore, vocab_size: int | None) -> None:
    """Refuse token numbers that are not in the vocabulary: an embedding would clip them silently.

    Raises:
        TPUValidationError: One is negative, or at or past `vocab_size`.
    """
    if vocab_size is not None and (largest := int(tokens.max(initial=0))) >= vocab_size:
        raise vocabulary_overflow(store, largest, vocab_size)
    # Unsigned tokens of 32 bits from 2**31 on have come out negative too.
    if store.dtype.itemsize > 2 and (smallest := int(tokens.min(initial=0))) < 0:
        raise TPUValidationError(
            f"{store.path} holds the token {smallest} when read as int32; token numbers go from 0 "
            "to 2147483647. Its dtype may be another."
        )


def vocabulary_overflow(store: TokenStore, largest: int, vocab_size: int) -> TPUValidationError:
    """The error for a token that the model has no embedding for."""
    made_by = store.tokenizer.get("name")
    hint = f" It was made with the tokenizer '{made_by}'." if made_by else ""
    return TPUValidationError(
        f"{store.path} holds the token {largest}, and the model's vocabulary ends at "
        f"{vocab_size - 1} (vocab_size={vocab_size}).{hint} Prepare the data with the model's own "
        f"tokenizer, or give it at least {largest + 1} tokens (in a job file, "
        f"'model: {{preset: …, vocab_size: {largest + 1}}}')."
    )
