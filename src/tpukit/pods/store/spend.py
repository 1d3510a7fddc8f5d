"""Costs of pods: intervals from ready to released, each at the price when it began."""

import json
import sqlite3
from collections.abc import Callable, Container
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ...hardware.figure import Figure
from ..pod import Pod
from .database import Database
from .records import to_json

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Spending:
    """The cost of one pod, from ready to released.

    Attributes:
        price: USD per hour for the whole pod, with source and date; missing with a reason if not
            known.
        released_at: None while the pod runs; its cost is then counted until now.
        last_seen_at: When the pod was last observed, if its provider does not answer now; its cost
            is counted until then. None otherwise.
    """

    run: str
    pod: str
    provider: str
    zone: str
    slice: str
    tier: str
    price: Figure
    ready_at: float
    released_at: float | None
    last_seen_at: float | None
    until: float

    @property
    def hours(self) -> float:
        """Hours from ready until released, last observed or now."""
        return max(0.0, self.until - self.ready_at) / SECONDS_PER_HOUR

    @property
    def cost(self) -> Figure:
        """Cost in USD, with the origin of the price."""
        return self.price.scaled(self.hours, unit="USD")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            **{name: getattr(self, name) for name in ("run", "pod", "provider", "zone")},
            "slice": self.slice,
            "tier": self.tier,
            "ready_at": _iso(self.ready_at),
            "released_at": None if self.released_at is None else _iso(self.released_at),
            "last_seen_at": None if self.last_seen_at is None else _iso(self.last_seen_at),
            "hours": self.hours,
            "price": self.price.to_dict(),
            "cost": self.cost.to_dict(),
        }


@dataclass(frozen=True)
class SpendLedger:
    """Intervals in which pods cost money."""

    database: Database
    now: Callable[[], float]

    def begin(self, run: str, provider: str, pod: Pod, price: Figure) -> None:
        """Start to count a pod, unless it is already counted."""
        self.database.write(
            "INSERT OR IGNORE INTO spend"
            " (run, pod, provider, zone, slice, tier, price, ready_at, seen_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(run, pod.name, provider, pod.zone, str(pod.slice), pod.tier.value),
            *(to_json(price.to_dict()), self.now(), self.now()),
        )

    def seen(self, provider: str, pod: str | None = None) -> None:
        """Record that a provider has answered, so that its pods were observed now."""
        self.database.write(
            "UPDATE spend SET seen_at = ?"
            " WHERE provider = ? AND released_at IS NULL AND pod = coalesce(?, pod)",
            *(self.now(), provider, pod),
        )

    def end(self, provider: str, *, zone: str, pod: str) -> None:
        """Stop counting a pod now; an uncounted pod is no error."""
        self.database.write(
            "UPDATE spend SET released_at = ?"
            " WHERE provider = ? AND zone = ? AND pod = ? AND released_at IS NULL",
            *(self.now(), provider, zone, pod),
        )

    def end_unseen(self, provider: str, *, zone: str, pod: str) -> None:
        """Stop counting a pod at its last observation."""
        self.database.write(
            "UPDATE spend SET released_at = coalesce(seen_at, ready_at)"
            " WHERE provider = ? AND zone = ? AND pod = ? AND released_at IS NULL",
            *(provider, zone, pod),
        )

    def end_all_but(self, provider: str, kept: Container[tuple[str, str]]) -> None:
        """Stop counting a provider's pods now, except those with these zones and names."""
        rows = self.database.read(
            "SELECT zone, pod FROM spend WHERE provider = ? AND released_at IS NULL", provider
        )
        for row in rows:
            if (row["zone"], row["pod"]) not in kept:
                self.end(provider, zone=row["zone"], pod=row["pod"])

    def all(self, run: str | None = None) -> list[Spending]:
        """Return all intervals, or those of one run, oldest first."""
        rows = self.database.read(
            "SELECT spend.*, silent_since FROM spend LEFT JOIN providers ON providers.id = provider"
            " ORDER BY ready_at, spend.id"
        )
        return [self._spending(row) for row in rows if run in (None, row["run"])]

    def _spending(self, row: sqlite3.Row) -> Spending:
        released_at, last_seen_at = row["released_at"], None
        if released_at is None and row["silent_since"] is not None:
            last_seen_at = row["seen_at"] or row["ready_at"]
        return Spending(
            run=row["run"],
            pod=row["pod"],
            provider=row["provider"],
            zone=row["zone"],
            slice=row["slice"],
            tier=row["tier"],
            price=Figure(**json.loads(row["price"])),
            ready_at=row["ready_at"],
            released_at=released_at,
            last_seen_at=last_seen_at,
            until=released_at or last_seen_at or self.now(),
        )


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
