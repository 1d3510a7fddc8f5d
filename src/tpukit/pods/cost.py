"""What was spent, by run, each sum with where its prices came from."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime
from itertools import groupby
from typing import Any

from ..hardware.figure import Figure
from ..shown import Shown
from .prices import catalogue_age
from .store import Spending, Store


@dataclass(frozen=True)
class RunCost:
    """The pods of one run.

    Attributes:
        total: USD; missing, with the reason, where the price of any pod is.
    """

    run: str
    intervals: tuple[Spending, ...]

    @property
    def hours(self) -> float:
        """Hours of pods, from ready to released."""
        return sum(one.hours for one in self.intervals)

    @property
    def total(self) -> Figure:
        """USD, as sure as the least sure price."""
        first, *rest = (one.cost for one in self.intervals)
        for cost in rest:
            first = first + cost
        return first

    @property
    def is_running(self) -> bool:
        """Whether it still costs."""
        return any(one.released_at is None for one in self.intervals)

    @property
    def unseen(self) -> str:
        """A sentence on pods that nobody can see now; "" where there are none."""
        lost = [one for one in self.intervals if one.last_seen_at is not None]
        if not lost:
            return ""
        names = ", ".join(one.pod for one in lost)
        seen = datetime.fromtimestamp(min(one.until for one in lost)).astimezone()
        return (
            f"{names}: counted until last seen ({seen:%Y-%m-%d %H:%M}), because the provider does "
            f"not answer since. tpukit pods ls looks again; tpukit pods forget {self.run} drops it."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "run": self.run,
            "hours": self.hours,
            "running": self.is_running,
            "unseen": self.unseen,
            "total": self.total.to_dict(),
            "pods": [one.to_dict() for one in self.intervals],
        }


@dataclass(frozen=True)
class CostReport(Shown):
    """What was spent, by run."""

    runs: tuple[RunCost, ...]

    @classmethod
    def of(cls, store: Store, run: str | None = None) -> "CostReport":
        """Add up what a store has counted."""

        def name(one: Spending) -> str:
            return one.run

        found = sorted(store.spend.all(run), key=name)
        return cls(tuple(RunCost(one, tuple(each)) for one, each in groupby(found, key=name)))

    @property
    def summary(self) -> str:
        """One line: dollars, hours, and how old the prices are."""
        hours = sum(run.hours for run in self.runs)
        known = [run.total for run in self.runs if run.total.value is not None]
        if not known:
            why = next((run.total.reason for run in self.runs), "no pod was ready")
            return f"{hours:.2f} pod-hours, no price: {why}"
        usd = sum(figure.value or 0.0 for figure in known)
        return f"${usd:.2f} for {hours:.2f} pod-hours ({_origin(known)})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"runs": [run.to_dict() for run in self.runs], "summary": self.summary}

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table("run", "pods", "hours", "USD", "price from", box=None, pad_edge=False)
        for run in self.runs:
            total = run.total
            usd = "–" if total.value is None else f"{total.value:.2f}"
            table.add_row(
                run.run + (" (unseen)" if run.unseen else " (running)" if run.is_running else ""),
                ", ".join(sorted({f"{one.slice} {one.tier}" for one in run.intervals})),
                f"{run.hours:.2f}",
                usd,
                total.reason if total.value is None else _origin([total]),
            )
        unseen = [Text(run.unseen, style="yellow") for run in self.runs if run.unseen]
        return Group(table, self.summary, *unseen)


def _origin(figures: Iterable[Figure]) -> str:
    """Say where prices came from and how old they are."""
    oldest = min(figures, key=lambda one: one.date or str(date.max))
    return f"{oldest.origin}: {oldest.source}, {catalogue_age(oldest)}"
