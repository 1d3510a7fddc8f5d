"""What the training loop draws batches from, its position, and what it says of itself."""

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from rich.table import Table

from ...errors import TPUValidationError
from ...shown import Shown

Batch = dict[str, np.ndarray]
# What makes a position another one, by the key of a state that differs.
_WHY = {
    "kind": "it was taken on another kind of data",
    "order": "this version of tpukit puts examples in another order",
    "fingerprint": "the data are others",
    "sequence_length": "examples were cut at another length",
    "packing": "examples were packed otherwise",
    "seed": "they were shuffled with another seed",
    "shuffle": "the order was another",
}


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


@dataclass(frozen=True, kw_only=True)
class DataDescription(Shown):
    """Where training data come from and how much there is; None: cannot be known.

    Attributes:
        num_examples: In one epoch.
        filled: Share of all positions that hold a token; the rest is padding.
        fingerprint: Of the content; a checkpoint's position is only taken up on the same.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

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
