"""How fast a data loader delivers, measured on its own for a bounded time."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...annotations import PyTree
from ...errors import TPUValidationError
from ...shown import Shown

BATCHES, SECONDS = 50, 5.0


@dataclass(frozen=True, kw_only=True)
class InputRate(Shown):
    """What a data loader delivers when nobody makes it wait; origin `measured`.

    Attributes:
        samples_per_s: After the first batch; None with `reason`.
        first_batch_s: Until the first batch, which may start workers or fill a buffer.
        batch: The first batch.
    """

    samples_per_s: float | None
    batches: int
    seconds: float
    first_batch_s: float
    samples_per_batch: int
    reason: str = ""
    batch: PyTree = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "origin": "measured",
            "samples_per_s": self.samples_per_s,
            "batches": self.batches,
            "seconds": self.seconds,
            "first_batch_s": self.first_batch_s,
            "samples_per_batch": self.samples_per_batch,
            "reason": self.reason,
        }


def measure_input(
    dataloader: Iterable[PyTree], *, batches: int = BATCHES, seconds: float = SECONDS
) -> InputRate:
    """Draw batches, at most so many and for so long, and say how fast they came.

    The limits are looked at between batches; the batches drawn are used up.

    Raises:
        TPUValidationError: It cannot be iterated, is empty, or its batches hold no arrays.
    """
    try:
        source = iter(dataloader)
    except TypeError:
        raise TPUValidationError(
            f"a {type(dataloader).__name__} is no data loader; pass something that yields batches."
        ) from None
    started = time.perf_counter()
    first = next(source, None)
    if first is None:
        raise TPUValidationError("the data loader is empty; pass one that yields batches.")
    first_s = time.perf_counter() - started
    size = _examples(first)
    drawn = samples = 0
    began = time.perf_counter()
    while drawn < batches and time.perf_counter() - began < seconds:
        batch = next(source, None)
        if batch is None:
            break
        drawn += 1
        samples += _examples(batch)
    took = time.perf_counter() - began
    rate = samples / took if drawn and took > 0 else None
    return InputRate(
        samples_per_s=rate,
        batches=drawn + 1,
        seconds=first_s + took,
        first_batch_s=first_s,
        samples_per_batch=size,
        reason="" if rate is not None else "it ended after one batch",
        batch=first,
    )


def _examples(batch: PyTree) -> int:
    """Examples in a batch: the first dimension of its first array."""
    values: list[Any] = [batch]
    while values:
        value = values.pop(0)
        shape = getattr(value, "shape", None)
        if shape:
            return int(shape[0])
        if isinstance(value, Mapping):
            values[:0] = list(value.values())  # pyright: ignore[reportUnknownArgumentType]  any batch
        elif isinstance(value, list | tuple):
            values[:0] = list(value)  # pyright: ignore[reportUnknownArgumentType]  any batch
    raise TPUValidationError(
        f"a batch of the data loader is a {type(batch).__name__} without arrays; its arrays must "
        "start with the batch dimension."
    )
