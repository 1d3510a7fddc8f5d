"""The stream that the training loop draws batches from, and its position."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from rich.table import Table

from ...errors import TPUValidationError
from ...shown import Shown

Batch = dict[str, np.ndarray]
# Why a position is not valid, by the key of the state that differs.
_REASONS = {
    "kind": "it is of another kind of data",
    "order": "this version of tpukit orders examples differently",
    "fingerprint": "the data differ",
    "sequence_length": "examples had another length",
    "packing": "examples were packed differently",
    "seed": "the shuffle had another seed",
    "shuffle": "shuffling was switched on or off",
}


class DataStream(Protocol):
    """An iterator of batches with a position that can be saved and restored."""

    @property
    def waited_s(self) -> float:
        """Seconds that the consumer has waited for batches."""
        ...

    def __next__(self) -> Batch:
        """Return this process's rows of the next batch."""
        ...

    def __iter__(self) -> "DataStream": ...

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch, as JSON data."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Move to a position of `state()`.

        Raises:
            TPUValidationError: The position is of other data or another length.
        """
        ...

    def close(self) -> None:
        """Stop reading ahead."""
        ...


class Stopwatch:
    """Adds up the seconds spent in `with` blocks."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.total_s += time.perf_counter() - self._began


def check_same(state: Mapping[str, Any], now: Mapping[str, Any], *, path: str) -> None:
    """Refuse a position of other data or settings.

    Raises:
        TPUValidationError: A setting that decides the order differs or is missing.
    """
    for key, why in _REASONS.items():
        if key in now and state.get(key) != now[key]:
            raise TPUValidationError(
                f"this position in the data cannot be restored on {path}: {why} ({key} was "
                f"{state.get(key)!r}, is {now[key]!r}). Give the same data and settings, or start "
                "a new run."
            )


@dataclass(frozen=True, kw_only=True)
class DataDescription(Shown):
    """A description of training data; None is unknown.

    Attributes:
        num_examples: Examples per epoch.
        filled: Share of positions with a token; the rest is padding.
        fingerprint: A hash of the content; a position is restored only on equal content.
    """

    kind: str
    path: str
    num_tokens: int | None = None
    num_examples: int | None = None
    num_documents: int | None = None
    sequence_length: int | None = None
    batch_size: int | None = None
    packing: str | None = None
    filled: float | None = None
    dtype: str | None = None
    largest_token: int | None = None
    fingerprint: str | None = None

    def __rich__(self) -> Table:
        table = Table(title=f"data: {self.path}", show_header=False, title_justify="left")
        for name, value in self.to_dict().items():
            if name != "path" and value is not None:
                if isinstance(value, int):
                    shown = f"{value:,}"
                elif isinstance(value, float):
                    shown = f"{value:.1%}"
                else:
                    shown = str(value)
                table.add_row(name.replace("_", " "), shown)
        return table
