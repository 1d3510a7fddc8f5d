"""A step as rows of slices and a counter: what both trace formats write down."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ....compiler.timeline import Span
from ..folding import find_loops, later_turns
from ..lanes import Lane, split_into_lanes

MEMORY_COUNTER = "live HBM"
ORIGIN = "model"


class Predicted(Protocol):
    """Whatever has spans: a `StepPrediction`, or a report read back."""

    @property
    def spans(self) -> Sequence[Span]:
        """What runs when."""
        ...


@dataclass(frozen=True)
class Trace:
    """One device's step.

    Attributes:
        name: Of the device, as a person reads it.
        lanes: Rows of slices, in reading order.
        memory: (nanoseconds, bytes) of live HBM, in order of time.
    """

    name: str
    lanes: tuple[Lane, ...]
    memory: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, spans: Sequence[Span], *, name: str, memory: Sequence[Sequence[float]] = ()
    ) -> "Trace":
        """Lay a step out; what of a loop is not shown becomes one slice that says so."""
        whole = [*spans, *later_turns(find_loops(spans))]
        points = sorted((round(seconds * 1e9), round(amount)) for seconds, amount in memory)
        # Of several values at one moment the highest is the one that must fit.
        highest: dict[int, int] = {}
        for moment, amount in points:
            highest[moment] = max(amount, highest.get(moment, 0))
        return cls(name, tuple(split_into_lanes(whole)), tuple(highest.items()))


def arguments_of(span: Span) -> dict[str, str | int | float]:
    """What a slice says of itself when it is clicked."""
    return {
        "cause": span.cause,
        "op_name": span.op_name,
        "flops": span.flops,
        "bytes": span.bytes,
        "times": span.times,
        "origin": ORIGIN,
    }
