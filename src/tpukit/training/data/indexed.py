"""Examples read by number: shuffled, shared among processes, and read ahead by grain."""

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from ...errors import MissingExtraError, TPUValidationError
from .stream import Batch, DataDescription, Stopwatch, check_same

_ROUNDS = 6
LARGEST = 2**62


def permute(indices: np.ndarray, *, size: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Return `indices` permuted by a permutation of range(size) that (seed, epoch) selects.

    Each result is computed without a buffer. Grain's `MapDataset.shuffle` does so one element at a
    time, at several microseconds per element, which is more than reading the tokens; this function
    works on arrays. An index is a cell of a table slightly larger than `size`; rows are shifted by
    a hash of their column and columns by a hash of their row in turns (a Feistel network). The few
    results past `size` are permuted again until they are below it.

    Args:
        indices: One-dimensional, integers in range(size).
        size: Length of the range, up to 2**62.
        seed: Any integer from 0.
        epoch: Each epoch has another permutation.
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = _round_keys(seed, epoch)
    permuted = _shift_in_turn(np.asarray(indices, np.int64), rows, columns, keys)
    outside = np.flatnonzero(permuted >= size)
    while outside.size:
        permuted[outside] = _shift_in_turn(permuted[outside], rows, columns, keys)
        outside = outside[permuted[outside] >= size]
    return permuted


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> np.ndarray:
    return np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint32)


def _shift_in_turn(values: np.ndarray, rows: int, columns: int, keys: np.ndarray) -> np.ndarray:
    """Permute range(rows * columns)."""
    row, column = np.divmod(values, columns)
    for round_ in range(0, _ROUNDS, 2):
        row = (row + _scatter(column, keys[round_])) % rows
        column = (column + _scatter(row, keys[round_ + 1])) % columns
    return row * columns + column


def _scatter(values: np.ndarray, key: np.uint32) -> np.ndarray:
    """Hash each value to 32 bits (the finaliser of MurmurHash3); multiplications wrap around."""
    mixed = values.astype(np.uint32) ^ key
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed


# Grain's cost is per element, so an element is as many batches as make about this size.
TOKENS_AT_ONCE, ROWS_AT_ONCE = 1 << 18, 256
NUM_WORKERS, PREFETCH = 4, 6


class ReadAhead:
    """Calls `read(first, count)` in grain's threads, and yields the batches in order.

    Args:
        read: Reads `count` batches from number `first` on; called from several threads.
        num_batches: Number of batches in total.
        rows: Examples per batch.
        tokens: Tokens per batch.
        num_workers: Number of threads.
        prefetch: Number of reads ahead of the consumer.

    Raises:
        MissingExtraError: Grain is not installed.
    """

    def __init__(
        self,
        read: Callable[[int, int], list[Batch]],
        *,
        num_batches: int,
        rows: int,
        tokens: int,
        num_workers: int = NUM_WORKERS,
        prefetch: int = PREFETCH,
    ) -> None:
        try:
            import grain
        except ImportError:
            raise MissingExtraError("data", needed_for="reading batches", module="grain") from None
        at_once = max(1, min(TOKENS_AT_ONCE // tokens, ROWS_AT_ONCE // rows))
        self._source = _Source(read, num_batches, at_once)
        options = grain.ReadOptions(num_threads=num_workers, prefetch_buffer_size=prefetch)
        elements = grain.MapDataset.source(self._source).to_iter_dataset(options)
        self._iterator: Any = iter(elements)

    def __next__(self) -> list[Batch]:
        return next(self._iterator)

    def close(self) -> None:
        """Stop reading; return when no thread reads any more."""
        self._iterator.close()
        self._source.wait()


class _Source:
    """A random access source for grain; an element is several batches."""

    def __init__(
        self, read: Callable[[int, int], list[Batch]], num_batches: int, at_once: int
    ) -> None:
        self._read, self._num_batches, self._at_once = read, num_batches, at_once
        self._changed = threading.Condition()
        self._reading = 0

    def __len__(self) -> int:
        return -(-self._num_batches // self._at_once)

    def __getitem__(self, index: int) -> list[Batch]:
        first = index * self._at_once
        with self._changed:
            self._reading += 1
        try:
            return self._read(first, min(self._at_once, self._num_batches - first))
        finally:
            with self._changed:
                self._reading -= 1
                self._changed.notify_all()

    def wait(self) -> None:
        """Return when no thread is in `__getitem__`."""
        with self._changed:
            self._changed.wait_for(lambda: self._reading == 0)


ORDER = 1  # to be raised when the same settings give another order


class Examples(Protocol):
    """A fixed number of examples that can be read by number."""

    def __len__(self) -> int: ...

    def read(self, numbers: np.ndarray) -> list[Batch]:
        """Return one batch per row of `numbers`, with the examples of these numbers."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class IndexedData:
    """Examples by number, and the order in which each process gets its rows.

    Example number p of the run, counted through all epochs, is row `p % batch_size` of batch
    `p // batch_size`. Process i of n has the i-th of n equal blocks of each batch's rows. So the
    order is the same for any number of processes, and a position is one number.
    """

    batch_size: int
    seed: int
    shuffle: bool
    process_index: int
    process_count: int
    num_epochs: int | None
    num_workers: int = NUM_WORKERS
    prefetch: int = PREFETCH

    @property
    def examples(self) -> Examples:
        """The examples."""
        raise NotImplementedError

    @property
    def path(self) -> str:
        """Path of the data, for messages."""
        raise NotImplementedError

    @property
    def example_size(self) -> int:
        """Numbers per example, which decide how many examples are read at once."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """Return the settings that a position depends on, beside order, seed and shuffle."""
        raise NotImplementedError

    def describe(self) -> DataDescription:
        """Return a description of the data."""
        raise NotImplementedError

    @property
    def rows(self) -> range:
        """This process's rows of each batch."""
        count = self.batch_size // self.process_count
        return range(self.process_index * count, (self.process_index + 1) * count)

    @property
    def num_batches(self) -> int | None:
        """Batches in all epochs; None for endless epochs."""
        if self.num_epochs is None:
            return None
        return self.num_epochs * len(self.examples) // self.batch_size

    def stream(self) -> "IndexedStream":
        """Return a stream of batches from the start."""
        return IndexedStream(self)

    def batches(self, first_example: int, count: int) -> list[Batch]:
        """Return this process's rows of `count` batches, beginning at an example of the run."""
        starts = first_example + self.batch_size * np.arange(count, dtype=np.int64)
        positions = starts[:, None] + np.asarray(self.rows, np.int64)
        epochs, numbers = np.divmod(positions, len(self.examples))
        if self.shuffle:
            for epoch in range(int(epochs[0, 0]), int(epochs[-1, -1]) + 1):
                at = epochs == epoch
                numbers[at] = permute(
                    numbers[at], size=len(self.examples), seed=self.seed, epoch=epoch
                )
        return self.examples.read(numbers)


class IndexedStream:
    """Batches of `IndexedData`, read ahead by grain's threads."""

    def __init__(self, data: IndexedData) -> None:
        self._data = data
        self._consumed = 0  # examples, over all processes and epochs
        self._waiting = Stopwatch()
        self._reader: ReadAhead | None = None
        self._ready: deque[Batch] = deque()

    @property
    def waited_s(self) -> float:
        """Seconds spent in `next`, waiting for batches."""
        return self._waiting.total_s

    def __iter__(self) -> "IndexedStream":
        return self

    def __next__(self) -> Batch:
        with self._waiting:
            if not self._ready:
                if self._reader is None:
                    self._reader = self._start()
                self._ready.extend(next(self._reader))
            batch = self._ready.popleft()
        self._consumed += self._data.batch_size
        return batch

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch, and the settings that it depends on."""
        return {"consumed_examples": self._consumed, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Move to a position of `state()`, on any number of processes and with any batch size.

        Raises:
            TPUValidationError: The position is of other data, another length or another order.
        """
        check_same(state, self._identity(), path=self._data.path)
        consumed = state.get("consumed_examples")
        if not isinstance(consumed, int) or consumed < 0:
            raise TPUValidationError(
                f"this position in the data has consumed_examples={consumed!r}; expected an "
                "integer "
                "from 0. The checkpoint's data state is damaged."
            )
        self.close()
        self._consumed = consumed

    def close(self) -> None:
        """Stop reading ahead; the next draw starts again from the position."""
        self._ready.clear()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _start(self) -> ReadAhead:
        data, begin, last = self._data, self._consumed, sys.maxsize
        if data.num_epochs is not None:
            last = data.num_epochs * len(data.examples)

        def read(first: int, count: int) -> list[Batch]:
            return data.batches(begin + first * data.batch_size, count)

        return ReadAhead(
            read,
            num_batches=max(0, (last - begin) // data.batch_size),
            rows=len(data.rows),
            tokens=len(data.rows) * data.example_size,
            num_workers=data.num_workers,
            prefetch=data.prefetch,
        )

    def _identity(self) -> dict[str, Any]:
        data = self._data
        return {"order": ORDER, "shuffle": data.shuffle, "seed": data.seed, **data.identity()}
