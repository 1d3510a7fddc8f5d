"""When a job is started again, and when that would be in vain."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...job.sections import LaunchSettings
from ..causes import Cause, Kind
from .journal import Attempt

LONGEST_PAUSE_S = 60.0
# Which host showed these first says nothing about that host.
_BLAMELESS = frozenset({Cause.PEER_LOST, Cause.STORAGE})


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How much is tried.

    Attributes:
        max_restarts: Failures of infrastructure to recover from; evictions do not count.
        max_stalls: Failures in a row without a step that no attempt had reached before: what
            happens again and again at the same place is not the infrastructure.
        auto_restart: Whether to go on after an eviction.
        max_host_faults: Failures in a row of one host after which its pod is given back.
        patience_s: How long capacity may be missing everywhere before the job ends.
        outage_s: How long the provider may not answer while a job runs.
        poll_s: Time between two looks at a pod.
        grace_s: What processes have to save when they are told to stop.
    """

    max_restarts: int = 10
    max_stalls: int = 3
    auto_restart: bool = True
    max_host_faults: int = 2
    patience_s: float = 24 * 3600.0
    outage_s: float = 600.0
    poll_s: float = 5.0
    grace_s: float = 30.0

    @classmethod
    def of(cls, launch: LaunchSettings) -> "Policy":
        """Return what a job's `launch:` section says."""
        return cls(max_restarts=launch.max_restarts)

    def why_stop(self, attempts: Sequence[Attempt]) -> str | None:
        """Return why not to start again after the last of these attempts; None to go on."""
        recent = since_fresh_start(attempts)
        ending = recent[-1].ending
        assert ending is not None
        kind = ending.cause.kind
        if kind is Kind.DONE:
            return ending.cause.meaning
        if kind is Kind.APPLICATION:
            return "the same would happen again"
        if kind is Kind.EVICTION:
            return None if self.auto_restart else "it is not to go on after an eviction"
        if self.max_stalls <= (stalls := count_stalls(recent)):
            return f"{stalls} attempts in a row failed without reaching a new step"
        failures = sum(_is_failure(attempt) for attempt in recent)
        if failures > self.max_restarts:
            return f"max_restarts is {self.max_restarts}, and this was failure {failures}"
        return None

    def pause_s(self, attempts: Sequence[Attempt]) -> float:
        """Return how long to wait before the next attempt: not at all while steps are made."""
        recent = since_fresh_start(attempts)
        stalls = count_stalls(recent)
        if stalls and (ending := recent[-1].ending) is not None and ending.cause is Cause.STORAGE:
            return LONGEST_PAUSE_S  # a full disk is not emptied within seconds
        return 0.0 if stalls < 2 else min(LONGEST_PAUSE_S, 2.0 ** (stalls - 2))

    def bad_hosts(self, attempts: Sequence[Attempt]) -> tuple[str, ...]:
        """Return the hosts not to use again: dirty ones, and those to blame again and again."""
        bad: dict[str, None] = {}
        before, in_a_row = "", 0
        for attempt in attempts:
            ending = attempt.ending
            if ending is None or not _is_failure(attempt):
                continue
            in_a_row = in_a_row + 1 if ending.host == before else 1
            before = ending.host
            often = in_a_row >= self.max_host_faults and ending.cause not in _BLAMELESS
            if ending.host and (often or ending.cause is Cause.DIRTY_HOST):
                bad[ending.host] = None
        return tuple(bad)


def since_fresh_start(attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """Return the attempts since somebody last started the job after it had ended for good."""
    first = 0
    for number, attempt in enumerate(attempts[:-1]):
        final = attempt.ending is not None and not attempt.ending.cause.is_worth_restarting
        first = number + 1 if final else first
    return attempts[first:]


def count_stalls(attempts: Sequence[Attempt]) -> int:
    """Return how many failures at the end came one after another without a new step."""
    best, stalls = 0, 0
    for attempt in attempts:
        reached = attempt.last_step or 0
        if reached > best:
            best, stalls = reached, 0
        elif _is_failure(attempt):
            stalls += 1
    return stalls


def _is_failure(attempt: Attempt) -> bool:
    ending = attempt.ending
    if ending is None or ending.cause is Cause.SUPERVISOR_LOST:
        return False
    return ending.cause.kind is Kind.INFRASTRUCTURE
