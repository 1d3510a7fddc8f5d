"""Zones that said no: remembered for a while, so that the next pod is asked for elsewhere first.

A zone is never locked. What it refused weighs half as much after each half-life, so a zone that
failed once is back in its place soon, and one that fails again and again is asked last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..causes import Cause
from ..config import PodConfig
from .database import Database

HALF_LIFE_S = 600.0
FORGIVEN = 0.5
"""A zone whose refusals weigh no more than this counts as one that never refused."""
_REMEMBERED_S = 20 * HALF_LIFE_S


@dataclass(frozen=True)
class Refusals:
    """Stock-outs, time-outs and losses by provider, slice, tier and zone."""

    database: Database
    now: Callable[[], float]

    def add(self, provider: str, config: PodConfig, zone: str, cause: Cause) -> None:
        """Remember that a zone refused a pod, or took one back."""
        with self.database.writing():
            self.database.write("DELETE FROM refusals WHERE at < ?", self.now() - _REMEMBERED_S)
            self.database.write(
                "INSERT INTO refusals VALUES (?, ?, ?, ?, ?, ?)",
                *(provider, str(config.slice), config.tier.value, zone, self.now(), cause.value),
            )

    def weight(self, provider: str, config: PodConfig, zone: str) -> float:
        """Return how much a zone's refusals count now: 1 for one just made."""
        rows = self.database.read(
            "SELECT at FROM refusals WHERE provider = ? AND slice = ? AND tier = ? AND zone = ?"
            " AND at >= ?",
            *(provider, str(config.slice), config.tier.value, zone, self.now() - _REMEMBERED_S),
        )
        return sum(0.5 ** ((self.now() - row["at"]) / HALF_LIFE_S) for row in rows)

    def order(self, provider: str, config: PodConfig, zones: Sequence[str]) -> list[str]:
        """Return the zones in the order to ask in: as given, those that refuse last."""
        weights = {zone: self.weight(provider, config, zone) for zone in zones}
        return sorted(zones, key=lambda zone: weights[zone] if weights[zone] > FORGIVEN else 0.0)
