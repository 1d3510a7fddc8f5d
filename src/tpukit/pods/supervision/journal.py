"""The attempts of a job and their events, recorded so that another supervisor can continue.

Losses are not stored but derived from consecutive attempts, so that they cannot contradict them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from ...shown import Facts, Shown
from ..causes import Cause, Ending
from ..pod import Pod
from ..providers.protocol import GangEvent


@dataclass(frozen=True, kw_only=True)
class Attempt(Shown):
    """An attempt at a job: a pod, its gang and the ending. Times are seconds since the epoch.

    Attributes:
        number: Number from 1, without gaps.
        pod: Name of the pod, which may have served the attempt before.
        slice: The requested slice, which a resize changes.
        asked_at: When the pod was requested, or the gang on an existing pod.
        started_at: When the processes were started.
        first_step: First completed step, counted from 1; None before.
        first_step_at: When the first step was completed.
        last_step: Newest completed step.
        ended_at: None while it runs.
        ending: None while it runs, and if the supervisor itself ended.
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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Attempt":
        """Read what `to_dict` wrote."""
        plain = dict(values)
        final = plain.pop("ending")
        ending = (
            None
            if final is None
            else Ending(Cause(final["cause"]), host=final["host"], evidence=final["evidence"])
        )
        return cls(**plain, ending=ending)


class Journal(Protocol):
    """Stores attempts, which outlive the process that recorded them."""

    def record(self, job: str, attempt: Attempt) -> None:
        """Store an attempt, replacing one with the same number."""
        ...

    def attempts(self, job: str) -> Sequence[Attempt]:
        """Return a job's attempts, oldest first."""
        ...


class MemoryJournal:
    """Stores attempts as long as the process lives."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[int, Attempt]] = {}

    def record(self, job: str, attempt: Attempt) -> None:
        """Store an attempt, replacing one with the same number."""
        self._jobs.setdefault(job, {})[attempt.number] = attempt

    def attempts(self, job: str) -> Sequence[Attempt]:
        """Return a job's attempts, oldest first."""
        return [attempt for _, attempt in sorted(self._jobs.get(job, {}).items())]


@dataclass(frozen=True)
class Loss(Facts):
    """The cost of one interruption.

    Attributes:
        downtime_s: From the last step before it to the first step after it; None while it lasts.
        lost_steps: Number of steps that had to be repeated.
    """

    attempt: int
    ending: Ending
    downtime_s: float | None
    lost_steps: int


def losses(attempts: Sequence[Attempt]) -> list[Loss]:
    """Return the cost of each interruption between a job's attempts."""
    costs: list[Loss] = []
    for before, after in pairwise(attempts):
        if before.ending is None:
            continue
        since = before.last_step_at or before.ended_at
        downtime_s, again = None, 0
        if since is not None and after.first_step_at is not None:
            downtime_s = after.first_step_at - since
        if before.last_step is not None and after.first_step is not None:
            again = max(0, before.last_step - after.first_step + 1)
        costs.append(Loss(before.number, before.ending, downtime_s, again))
    return costs


@dataclass(frozen=True)
class PodAsked:
    """A pod is about to be requested."""

    name: str
    zone: str


@dataclass(frozen=True)
class PodRefused:
    """A zone refused a pod, or did not grant it in time."""

    name: str
    zone: str
    cause: Cause
    reason: str


@dataclass(frozen=True)
class PodReady:
    """A pod is ready, and costs money from now on."""

    pod: Pod


@dataclass(frozen=True)
class PodReleased:
    """A pod was deleted, because it was lost, is replaced or is not needed."""

    pod: Pod


@dataclass(frozen=True)
class AttemptBegan:
    """Processes were started."""

    attempt: Attempt


@dataclass(frozen=True)
class AttemptEnded:
    """All processes have ended, with `attempt.ending`."""

    attempt: Attempt


SupervisionEvent = (
    PodAsked | PodRefused | PodReady | PodReleased | AttemptBegan | AttemptEnded | GangEvent
)
