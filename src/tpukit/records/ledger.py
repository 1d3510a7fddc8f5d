"""The time of a run: steps that count, and everything else by cause."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..shown import Shown


@dataclass(frozen=True, kw_only=True)
class Goodput(Shown):
    """The share of wall time spent in steps that count (origin: measured).

    Attributes:
        wall_s: Seconds from the start of `train()`.
        productive_s: Seconds in steps whose result was kept, without waiting for input.
        spent_s: Other seconds by cause: compile, restore, initialise, checkpoint, evaluate,
            input_stall (devices wait for a batch), lost (steps rolled back).
    """

    wall_s: float
    productive_s: float
    spent_s: dict[str, float] = field(default_factory=dict[str, float])
    origin = "measured"
    _facts = ("origin", ("goodput", "share"), "wall_s", "productive_s", "spent_s")

    @property
    def share(self) -> float | None:
        """Productive over wall time; None before any time has passed."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else None

    def __str__(self) -> str:
        if self.share is None:
            return "–"
        rest = ", ".join(
            f"{name.replace('_', ' ')} {value:.1f} s"
            for name, value in self.spent_s.items()
            if value >= 0.05  # shorter ones would read 0.0
        )
        return f"{self.share:.1%} of {self.wall_s:.1f} s" + (f" ({rest})" if rest else "")


class Ledger:
    """Adds up time by cause, and times steps by their completion.

    Steps are dispatched ahead, so a step is timed from the completion of the one before it, or from
    `mark()` after other work in between.

    Attributes:
        on_booked: Called with cause and seconds of all booked time, except input stalls of steps.
    """

    on_booked: Callable[[str, float], None] | None = None

    def __init__(self) -> None:
        self._began = self._mark = time.perf_counter()
        self._spent: dict[str, float] = {}
        self._productive: dict[int, float] = {}
        self._productive_s = 0.0

    @contextmanager
    def doing(self, what: str) -> Generator[None]:
        """Book the time of the block under a cause; the next step is timed from its end."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.add(what, took)
            self.mark()
            self._tell(what, took)

    def add(self, what: str, seconds: float) -> None:
        """Add seconds to a cause."""
        self._spent[what] = self._spent.get(what, 0.0) + seconds

    def mark(self) -> None:
        """Time the next step from now."""
        self._mark = time.perf_counter()

    def completed(self, step: int, *, stalled_s: float) -> float:
        """Record that a step has completed; return its seconds, with its input stall."""
        now = time.perf_counter()
        took, self._mark = now - self._mark, now
        stalled = min(stalled_s, took)
        self._productive[step] = took - stalled
        self._productive_s += took - stalled
        self.add("input_stall", stalled)
        return took

    def roll_back(self, step: int) -> None:
        """Count the time of the steps after `step` as lost."""
        undone = [number for number in self._productive if number > step]
        seconds = sum(self._productive.pop(number) for number in undone)
        self._productive_s -= seconds
        self.add("lost", seconds)
        self._tell("lost", seconds)

    def _tell(self, what: str, seconds: float) -> None:
        if self.on_booked is not None:
            self.on_booked(what, seconds)

    def goodput(self) -> Goodput:
        """Return the goodput until now."""
        return Goodput(
            wall_s=time.perf_counter() - self._began,
            productive_s=self._productive_s,
            spent_s=dict(self._spent),
        )
