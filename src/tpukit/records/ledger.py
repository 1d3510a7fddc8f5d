"""Where the time of a run goes: steps that count, and everything else by name."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..shown import Shown


@dataclass(frozen=True, kw_only=True)
class Goodput(Shown):
    """The share of wall time spent in steps that count (origin: measured).

    Attributes:
        wall_s: From the start of `train()`.
        productive_s: In steps whose result was kept, without waiting for input.
        spent_s: The rest by name: compile, restore, initialise, checkpoint, evaluate,
            input_stall (devices idle for want of a batch), lost (steps rolled back).
    """

    wall_s: float
    productive_s: float
    spent_s: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def share(self) -> float | None:
        """Productive over wall time; None before any time has passed."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "origin": "measured",
            "goodput": self.share,
            "wall_s": self.wall_s,
            "productive_s": self.productive_s,
            "spent_s": dict(self.spent_s),
        }

    def __str__(self) -> str:
        if self.share is None:
            return "–"
        rest = ", ".join(
            f"{name.replace('_', ' ')} {value:.1f} s"
            for name, value in self.spent_s.items()
            if value >= 0.05  # the rest would read 0.0
        )
        return f"{self.share:.1%} of {self.wall_s:.1f} s" + (f" ({rest})" if rest else "")


class Ledger:
    """Adds up where time goes, and times steps by when each completes.

    Steps are dispatched ahead, so a step lasts from the completion of the one before it, or from
    `mark()` where something else came between.

    Attributes:
        on_booked: Told of everything that is booked but for the input waited for in each step.
    """

    on_booked: Callable[[str, float], None] | None = None

    def __init__(self) -> None:
        self._began = self._mark = time.perf_counter()
        self._spent: dict[str, float] = {}
        self._productive: dict[int, float] = {}
        self._productive_s = 0.0

    @contextmanager
    def doing(self, what: str) -> Generator[None]:
        """Book the time of the block under a name; the next step is timed from its end."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.add(what, took)
            self.mark()
            self._tell(what, took)

    def add(self, what: str, seconds: float) -> None:
        """Book some seconds under a name."""
        self._spent[what] = self._spent.get(what, 0.0) + seconds

    def mark(self) -> None:
        """The next step begins now."""
        self._mark = time.perf_counter()

    def completed(self, step: int, *, stalled_s: float) -> float:
        """A step has completed now; how long it took, waiting for its input included."""
        now = time.perf_counter()
        took, self._mark = now - self._mark, now
        stalled = min(stalled_s, took)
        self._productive[step] = took - stalled
        self._productive_s += took - stalled
        self.add("input_stall", stalled)
        return took

    def roll_back(self, step: int) -> None:
        """Steps after `step` no longer count."""
        undone = [number for number in self._productive if number > step]
        seconds = sum(self._productive.pop(number) for number in undone)
        self._productive_s -= seconds
        self.add("lost", seconds)
        self._tell("lost", seconds)

    def _tell(self, what: str, seconds: float) -> None:
        if self.on_booked is not None:
            self.on_booked(what, seconds)

    def goodput(self) -> Goodput:
        """Where the time went so far."""
        return Goodput(
            wall_s=time.perf_counter() - self._began,
            productive_s=self._productive_s,
            spent_s=dict(self._spent),
        )
