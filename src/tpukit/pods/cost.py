"""Prices of pods and the cost of each run, with the source of every price."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from itertools import groupby
from typing import Any

from ..errors import ConfigError, PodUnavailable
from ..hardware.figure import Figure
from ..hardware.prices import PriceBook, public_prices
from ..shown import Facts, Shown
from .causes import Cause
from .config import PodConfig
from .pod import Tier
from .store import Spending, Store

UNIT = "USD/h"
# The user's own machines have no list price.
_OWN_MACHINES = ("local", "ssh")


def price_of(
    config: PodConfig, *, zone: str, provider: str, book: PriceBook | None = None
) -> Figure:
    """Return USD per hour of a whole pod in a zone, or a missing figure with the reason."""
    if provider in _OWN_MACHINES:
        return Figure.missing(UNIT, f"'{provider}' uses your own machines.")
    if config.tier is Tier.RESERVED:
        return Figure.missing(UNIT, "the price of reserved capacity is in your contract.")
    if not zone:
        return Figure.missing(UNIT, "no zone is named, and prices differ by region.")
    region = zone.rpartition("-")[0] or zone
    try:
        return (book or public_prices()).cost_per_hour(
            config.slice, region=region, tier=config.tier.value
        )
    except ConfigError:
        return Figure.missing(UNIT, f"the price catalog has no region {region!r}.")


def zones_within_cap(
    config: PodConfig, zones: Sequence[str], *, provider: str, book: PriceBook | None = None
) -> list[str]:
    """Return the zones in which a pod costs no more than its cap, in the same order.

    Raises:
        PodUnavailable: Every zone is above the cap. The message names the cheapest and the
            catalog's age.
    """
    cap = config.max_price_per_hour
    if cap is None or provider in _OWN_MACHINES:
        return list(zones)
    prices = {zone: price_of(config, zone=zone, provider=provider, book=book) for zone in zones}
    known = {zone: price.value for zone, price in prices.items() if price.value is not None}
    within = [zone for zone in zones if known.get(zone, cap + 1) <= cap]
    if within:
        return within
    if known:
        cheapest = min(known, key=lambda zone: known[zone])
        price = prices[cheapest]
        seen = f"the lowest price is ${known[cheapest]:.2f} in {cheapest} ({catalogue_age(price)})"
    else:
        reason = next(iter(prices.values())).reason if prices else "no zone"
        seen = f"no price is known: {reason.rstrip('.')}"
    raise PodUnavailable(
        f"{config.slice} ({config.tier}) for at most ${cap:.2f} per hour is not available: "
        f"{seen}. Raise max_price_per_hour, add zones, or use a smaller slice.",
        cause=Cause.UNPLACEABLE.value,
    )


def catalogue_age(price: Figure, *, today: date | None = None) -> str:
    """Return the age of a price: "prices of 2026-08-21, 87 days old"."""
    try:
        day = date.fromisoformat(price.date[:10])
    except ValueError:
        return f"{price.source or 'no source'}, no date"
    days = ((today or datetime.now(UTC).date()) - day).days
    return f"prices of {day}, {days} days old"


@dataclass(frozen=True)
class RunCost(Facts):
    """Pods of one run, and their cost.

    Attributes:
        total: Cost in USD; missing, with the reason, if the price of any pod is missing.
    """

    run: str
    intervals: tuple[Spending, ...]
    _facts = ("run", "hours", ("running", "is_running"), "unseen", "total", ("pods", "intervals"))

    @property
    def hours(self) -> float:
        """Pod hours, from ready to released."""
        return sum(interval.hours for interval in self.intervals)

    @property
    def total(self) -> Figure:
        """Cost in USD, with the origin of its least certain price."""
        first, *rest = (interval.cost for interval in self.intervals)
        for cost in rest:
            first = first + cost
        return first

    @property
    def is_running(self) -> bool:
        """Whether a pod of the run still costs money."""
        return any(interval.released_at is None for interval in self.intervals)

    @property
    def unseen(self) -> str:
        """A sentence on pods whose provider does not answer now; "" where there are none."""
        lost = [interval for interval in self.intervals if interval.last_seen_at is not None]
        if not lost:
            return ""
        names = ", ".join(interval.pod for interval in lost)
        seen = datetime.fromtimestamp(min(interval.until for interval in lost)).astimezone()
        return (
            f"{names}: counted until last seen ({seen:%Y-%m-%d %H:%M}), because the provider has "
            f"not answered since. tpukit pods ls asks it again; tpukit pods forget {self.run} "
            "drops it."
        )


@dataclass(frozen=True)
class CostReport(Shown):
    """Cost of each run."""

    runs: tuple[RunCost, ...]
    _facts = ("runs", "summary")

    @classmethod
    def of(cls, store: Store, run: str | None = None) -> "CostReport":
        """Sum the spending of a store."""

        def name(interval: Spending) -> str:
            return interval.run

        intervals = sorted(store.spend.all(run), key=name)
        return cls(tuple(RunCost(run, tuple(each)) for run, each in groupby(intervals, key=name)))

    @property
    def summary(self) -> str:
        """One line with dollars, hours and the age of the prices."""
        hours = sum(run.hours for run in self.runs)
        known = [run.total for run in self.runs if run.total.value is not None]
        if not known:
            why = next((run.total.reason for run in self.runs), "no pod was ready")
            return f"{hours:.2f} pod-hours, no price: {why}"
        usd = sum(figure.value or 0.0 for figure in known)
        return f"${usd:.2f} for {hours:.2f} pod-hours ({_origin(known)})"

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
                ", ".join(
                    sorted({f"{interval.slice} {interval.tier}" for interval in run.intervals})
                ),
                f"{run.hours:.2f}",
                usd,
                total.reason if total.value is None else _origin([total]),
            )
        unseen = [Text(run.unseen, style="yellow") for run in self.runs if run.unseen]
        return Group(table, self.summary, *unseen)


def _origin(figures: Iterable[Figure]) -> str:
    """Return the source and age of prices."""
    oldest = min(figures, key=lambda price: price.date or str(date.max))
    return f"{oldest.origin}: {oldest.source}, {catalogue_age(oldest)}"
