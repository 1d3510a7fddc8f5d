"""The attempts of a job, written down as they happen: all that a supervisor needs to go on.

What was lost is not stored but follows from two attempts that come after each other, so that it
cannot disagree with them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol

from ...shown import Shown
from ..causes import Cause, Ending


@dataclass(frozen=True, kw_only=True)
class Attempt(Shown):
    """One try at a job: a pod, a gang on it, and how it ended. Times are seconds since the epoch.

    Attributes:
        number: From 1, without gaps.
        pod: Name of the pod, which may have served the attempt before.
        slice: What was asked for; another one after a resize.
        asked_at: When the pod was asked for, or the gang on a pod that was there.
        started_at: When the processes were started.
        first_step: The first step that was completed, counted from 1; None before.
        first_step_at: When that was.
        last_step: The newest completed step.
        ended_at: None while it runs.
        ending: None while it runs, and where the supervisor itself ended.
    """

    number: int
    pod: str
    zone: str
    slice: str
    asked_at: float
    started_at: float | None = None
    first_step: int | None = None
    first_step_at: float | None = None
    last_step: int | None = None
    last_step_at: float | None = None
    last_loss: float | None = None
    ended_at: float | None = None
    ending: Ending | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `from_dict` reads it."""
        ending = None if self.ending is None else self.ending.to_dict()
        return {**asdict(self), "ending": ending}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Attempt":
        """Read what `to_dict` wrote."""
        plain = dict(values)
        said = plain.pop("ending")
        ending = (
            None
            if said is None
            else Ending(Cause(said["cause"]), host=said["host"], evidence=said["evidence"])
        )
        return cls(**plain, ending=ending)


class Journal(Protocol):
    """Where attempts are kept. What was recorded outlives the process that recorded it."""

    def record(self, job: str, attempt: Attempt) -> None:
        """Keep an attempt, instead of one with the same number."""
        ...

    def attempts(self, job: str) -> Sequence[Attempt]:
        """Return a job's attempts, oldest first."""
        ...


class MemoryJournal:
    """Keeps attempts as long as the process lives."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[int, Attempt]] = {}

    def record(self, job: str, attempt: Attempt) -> None:
        """Keep an attempt, instead of one with the same number."""
        self._jobs.setdefault(job, {})[attempt.number] = attempt

    def attempts(self, job: str) -> Sequence[Attempt]:
        """Return a job's attempts, oldest first."""
        return [attempt for _, attempt in sorted(self._jobs.get(job, {}).items())]


@dataclass(frozen=True)
class Loss:
    """What one interruption cost.

    Attributes:
        downtime_s: From the last step before it to the first step after it; None while it lasts.
        lost_steps: Steps that had to be done again.
    """

    attempt: int
    ending: Ending
    downtime_s: float | None
    lost_steps: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "ending": self.ending.to_dict()}


def losses(attempts: Sequence[Attempt]) -> list[Loss]:
    """Return what each interruption between the attempts of a job cost."""
    found: list[Loss] = []
    for before, after in pairwise(attempts):
        if before.ending is None:
            continue
        since = before.last_step_at or before.ended_at
        downtime_s, again = None, 0
        if since is not None and after.first_step_at is not None:
            downtime_s = after.first_step_at - since
        if before.last_step is not None and after.first_step is not None:
            again = max(0, before.last_step - after.first_step + 1)
        found.append(Loss(before.number, before.ending, downtime_s, again))
    return found
