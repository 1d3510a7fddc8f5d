"""What the training loop draws batches from, and how it comes back to where it was."""

import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ...errors import TPUValidationError

Batch = dict[str, np.ndarray]


class DataStream(Protocol):
    """Batches one after another, with a position that can be kept and taken up again."""

    @property
    def waited_s(self) -> float:
        """Seconds that drawing took in all: what the consumer waited."""
        ...

    def __next__(self) -> Batch:
        """This process's rows of the next batch."""
        ...

    def __iter__(self) -> "DataStream": ...

    def state(self) -> dict[str, Any]:
        """The position after the last batch drawn, as JSON data."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where `state` was taken.

        Raises:
            TPUValidationError: It was taken on other data, or cut otherwise.
        """
        ...

    def close(self) -> None:
        """Stop reading ahead."""
        ...


class Stopwatch:
    """Seconds spent inside `with` blocks, added up."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.total_s += time.perf_counter() - self._began


_WHY = {
    "kind": "it was taken on another kind of data",
    "order": "this version of tpukit puts examples in another order",
    "fingerprint": "the data are others",
    "sequence_length": "examples were cut at another length",
    "packing": "examples were packed otherwise",
    "seed": "they were shuffled with another seed",
    "shuffle": "the order was another",
}


def check_same(state: Mapping[str, Any], now: Mapping[str, Any], *, path: str) -> None:
    """Refuse a position that means something else here than where it was taken.

    Raises:
        TPUValidationError: One of the settings that decide the order differs, or is missing.
    """
    for key, why in _WHY.items():
        if key in now and state.get(key) != now[key]:
            raise TPUValidationError(
                f"this position in the data cannot be taken up on {path}: {why} ({key} was "
                f"{state.get(key)!r}, is {now[key]!r}). Give the same data and settings, or start "
                "the data anew."
            )
