"""The life of one pod, and whoever remembers such lives."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ..causes import Cause
from ..pod import Tier


@dataclass(frozen=True, kw_only=True)
class PodLife:
    """One pod that was asked for, and what became of it; times in seconds since the epoch.

    Attributes:
        ready_at: None where it never was.
        ended_at: None while it is wanted.
        cause: Why it ended, or was not to be had; None while it is wanted.
    """

    slice: str
    zone: str
    tier: Tier
    asked_at: float
    ready_at: float | None = None
    ended_at: float | None = None
    cause: Cause | None = None


class PodLives(Protocol):
    """Whoever remembers pods: the manager's store."""

    def lives(self, *, since: float) -> Iterable[PodLife]:
        """Return the pods that were wanted at some time after `since`."""
        ...


class NoLives:
    """Remembers nothing: only the public record counts."""

    def lives(self, *, since: float) -> Iterable[PodLife]:
        """Return nothing."""
        return ()
