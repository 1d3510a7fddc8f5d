"""One quantity, predicted and measured, with the machine that each is of."""

from dataclasses import dataclass
from typing import Any

from ..hardware.figure import Figure, seconds_text

THIS_MACHINE = "this machine's CPU"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A predicted figure beside a measured one.

    Attributes:
        what: The quantity.
        predicted: What was said before.
        predicted_of: The machine, or the arithmetic, that it holds for.
        measured: What came out.
        measured_on: The machine.
        is_comparable: Whether one can be held against the other. What was predicted for a TPU
            and measured on a CPU cannot.
        remark: What to make of the pair.
    """

    what: str
    predicted: Figure
    predicted_of: str
    measured: Figure
    measured_on: str = THIS_MACHINE
    is_comparable: bool
    remark: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where the two are of different machines, or one misses."""
        if not self.is_comparable or not self.predicted.value or self.measured.value is None:
            return None
        return self.measured.value / self.predicted.value

    @property
    def ratio_text(self) -> str:
        """The ratio as one reads it."""
        if not self.is_comparable:
            return "different machines"
        return "–" if self.ratio is None else f"{self.ratio:.3g} ×"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "what": self.what,
            "predicted": {**self.predicted.to_dict(), "of": self.predicted_of},
            "measured": {**self.measured.to_dict(), "on": self.measured_on},
            "comparable": self.is_comparable,
            "ratio": self.ratio,
            "remark": self.remark,
        }


def figure_text(figure: Figure) -> str:
    """Write a figure short: 26.5 ms, 4.12 MiB, 3.2 %."""
    if figure.value is None:
        return "–"
    if figure.unit == "s":
        return seconds_text(figure.value)
    if figure.unit == "share":
        return f"{figure.value:.1%}"
    return figure.text


def measured(value: float, unit: str, source: str) -> Figure:
    """Return a figure that this machine gave."""
    return Figure(value, unit, "measured", source)
