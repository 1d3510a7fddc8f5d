"""Batches read ahead of the consumer by threads of grain."""

import threading
from collections.abc import Callable
from typing import Any

from ...errors import MissingExtraError
from .stream import Batch

# Grain costs by element, so an element is as many batches as come to about this much.
TOKENS_AT_ONCE, ROWS_AT_ONCE = 1 << 18, 256
NUM_WORKERS, PREFETCH = 4, 6


class ReadAhead:
    """Runs `read(first, count)` in threads for batches first, first + count, … in order.

    Args:
        read: Reads `count` batches from number `first` on; called from several threads.
        num_batches: Where it ends.
        rows: Examples in a batch.
        tokens: Tokens in a batch.
        num_workers: Threads that read.
        prefetch: Reads that are under way or done before they are asked for.

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
        """Stop; when it returns, nobody reads any more."""
        self._iterator.close()
        self._source.wait()


class _Source:
    """Several batches to an element: what grain calls a random access source."""

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
        """Until no thread is inside `__getitem__`."""
        with self._changed:
            self._changed.wait_for(lambda: self._reading == 0)
