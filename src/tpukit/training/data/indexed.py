"""Examples that are read by number through grain: shuffled, dealt out to processes, read ahead."""

import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...errors import TPUValidationError
from .permutation import permute
from .read_ahead import NUM_WORKERS, PREFETCH, ReadAhead
from .stream import Batch, DataDescription, Stopwatch, check_same

ORDER = 1  # raise it when the same settings come to give another order


class Examples(Protocol):
    """A fixed number of examples that can be read by number."""

    def __len__(self) -> int: ...

    def read(self, numbers: np.ndarray) -> list[Batch]:
        """A batch for each row of `numbers`, of the examples it names."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class IndexedData:
    """Examples by number, and the order in which every process gets its rows.

    Example number p of the run (p counts on through the epochs) is row `p % batch_size` of batch
    `p // batch_size`; process i of n has the i-th n-th of the rows of each. So the order is the
    same for any number of processes, and a position is one number.
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
        """Where the data are, for messages."""
        raise NotImplementedError

    @property
    def example_size(self) -> int:
        """Numbers in an example; they decide how many examples are read at once."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """What a position in the data depends on, beside order, seed and shuffle."""
        raise NotImplementedError

    def describe(self) -> DataDescription:
        """What the data are."""
        raise NotImplementedError

    @property
    def rows(self) -> range:
        """The rows of each batch that belong to this process."""
        count = self.batch_size // self.process_count
        return range(self.process_index * count, (self.process_index + 1) * count)

    @property
    def num_batches(self) -> int | None:
        """Batches in all epochs; None when they go on forever."""
        if self.num_epochs is None:
            return None
        return self.num_epochs * len(self.examples) // self.batch_size

    def stream(self) -> "IndexedStream":
        """Batches from the start."""
        return IndexedStream(self)

    def batches(self, first_example: int, count: int) -> list[Batch]:
        """This process's rows of `count` batches, from this example of the run on."""
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
    """Batches of `IndexedData`, read ahead by threads of grain."""

    def __init__(self, data: IndexedData) -> None:
        self._data = data
        self._consumed = 0  # examples, over all processes and epochs
        self._waiting = Stopwatch()
        self._reader: ReadAhead | None = None
        self._ready: deque[Batch] = deque()

    @property
    def waited_s(self) -> float:
        """Seconds `next` took in all, waiting for batches."""
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
        """The position after the last batch drawn, and what it is a position in."""
        return {"consumed_examples": self._consumed, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where `state` was taken, on any number of processes and with any batch size.

        Raises:
            TPUValidationError: It was taken on other data, or cut or shuffled otherwise.
        """
        check_same(state, self._identity(), path=self._data.path)
        consumed = state.get("consumed_examples")
        if not isinstance(consumed, int) or consumed < 0:
            raise TPUValidationError(
                f"this position in the data says consumed_examples={consumed!r}; it must be a "
                "number from 0. The checkpoint's data state is damaged."
            )
        self.close()
        self._consumed = consumed

    def close(self) -> None:
        """Stop reading ahead; drawing again starts anew from the position."""
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
