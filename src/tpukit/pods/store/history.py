"""What became of pods by zone, so that the next one is asked for where it is likely to be had.

A zone is never locked. What it refused or took back weighs half as much after each half-life, so a
zone that failed once is back in its place soon, and one that fails again and again is asked last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..causes import Cause, Kind
from ..config import PodConfig
from ..pod import Tier
from ..spot.life import PodLife
from .database import Database

HALF_LIFE_S = 600.0
FORGIVEN = 0.5
"""A zone whose refusals weigh no more than this counts as one that never refused."""
_COUNTED_S = 20 * HALF_LIFE_S
_AGAINST_A_ZONE = tuple(
    cause.value for cause in Cause if cause.kind in (Kind.CAPACITY, Kind.EVICTION)
)


@dataclass(frozen=True)
class PodHistory:
    """When each pod was asked for, ready and over, and why it ended."""

    database: Database
    now: Callable[[], float]

    def asked(self, provider: str, config: PodConfig, *, zone: str, pod: str) -> None:
        """A pod is asked for; one that is asked for already is no other one."""
        self.database.write(
            "INSERT OR IGNORE INTO lives (provider, zone, pod, slice, tier, asked_at)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            *(provider, zone, pod, str(config.slice), config.tier.value, self.now()),
        )

    def askers(self, *, zone: str, pod: str) -> set[str]:
        """Return the ids of the provider records that ever asked for a pod."""
        rows = self.database.read(
            "SELECT DISTINCT provider FROM lives WHERE zone = ? AND pod = ?", zone, pod
        )
        return {row["provider"] for row in rows}

    def ready(self, provider: str, *, zone: str, pod: str) -> None:
        """All hosts of a pod are there."""
        self.database.write(
            "UPDATE lives SET ready_at = ? WHERE provider = ? AND zone = ? AND pod = ?"
            " AND ended_at IS NULL AND ready_at IS NULL",
            *(self.now(), provider, zone, pod),
        )

    def ended(self, provider: str, *, zone: str, pod: str, cause: Cause) -> None:
        """A pod was refused, lost or given back; the first cause that is told counts."""
        self.database.write(
            "UPDATE lives SET ended_at = ?, cause = ? WHERE provider = ? AND zone = ? AND pod = ?"
            " AND ended_at IS NULL",
            *(self.now(), cause.value, provider, zone, pod),
        )

    def order(self, provider: str, config: PodConfig, zones: Sequence[str]) -> list[str]:
        """Return the zones in the order to ask in: as given, those that refuse last."""
        weights = {zone: self._weight(provider, config, zone) for zone in zones}
        return sorted(zones, key=lambda zone: weights[zone] if weights[zone] > FORGIVEN else 0.0)

    def lives(self, *, since: float) -> list[PodLife]:
        """Return the pods that were wanted at some time after `since`, oldest first."""
        rows = self.database.read(
            "SELECT * FROM lives WHERE ended_at IS NULL OR ended_at >= ? ORDER BY asked_at", since
        )
        return [
            PodLife(
                slice=row["slice"],
                zone=row["zone"],
                tier=Tier(row["tier"]),
                asked_at=row["asked_at"],
                ready_at=row["ready_at"],
                ended_at=row["ended_at"],
                cause=None if row["cause"] is None else Cause(row["cause"]),
            )
            for row in rows
        ]

    def _weight(self, provider: str, config: PodConfig, zone: str) -> float:
        """Return how much a zone's refusals and losses count now: 1 for one just made."""
        rows = self.database.read(
            "SELECT ended_at, cause FROM lives WHERE provider = ? AND slice = ? AND tier = ?"
            " AND zone = ? AND ended_at >= ?",
            *(provider, str(config.slice), config.tier.value, zone, self.now() - _COUNTED_S),
        )
        return sum(
            0.5 ** ((self.now() - row["ended_at"]) / HALF_LIFE_S)
            for row in rows
            if row["cause"] in _AGAINST_A_ZONE
        )
