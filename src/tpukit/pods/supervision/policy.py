"""Decide whether a job is started again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Self

from ...errors import ConfigError
from ...job.job import Job
from ...job.sections import LaunchSettings
from ..causes import Cause, Kind
from ..pod import Pod
from .journal import Attempt

LONGEST_PAUSE_S = 60.0
# For these causes, the first host to report one is not to blame.
_BLAMELESS = frozenset({Cause.PEER_LOST, Cause.STORAGE})


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Limits on restarts and waits.

    Attributes:
        max_restarts: Number of infrastructure failures to recover from; evictions do not count.
        max_stalls: Consecutive failures without a new step, after which the job stops, because a
            failure that repeats at the same place is not the infrastructure's.
        auto_restart: Whether to continue after an eviction.
        max_host_faults: Consecutive failures of one host after which its pod is released.
        patience_s: How long all zones may lack capacity before the job ends.
        outage_s: How long the provider may not answer.
        poll_s: Seconds between two queries of a pod.
        grace_s: Time for processes to save when they are told to stop.
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
        """Make the policy of a job's `launch:` section."""
        return cls(
            max_restarts=launch.max_restarts,
            outage_s=launch.api_timeout_seconds,
            grace_s=launch.save_timeout_seconds,
        )

    def why_stop(self, attempts: Sequence[Attempt]) -> str | None:
        """Return why not to start again after these attempts, or None."""
        recent = since_fresh_start(attempts)
        ending = recent[-1].ending
        assert ending is not None
        kind = ending.cause.kind
        if kind is Kind.DONE:
            return ending.cause.meaning
        if kind is Kind.APPLICATION:
            return "the same would happen again"
        if kind is Kind.EVICTION:
            return None if self.auto_restart else "auto_restart is off, and it was evicted"
        if self.max_stalls <= (stalls := count_stalls(recent)):
            return f"{stalls} attempts in a row failed without reaching a new step"
        failures = sum(_is_failure(attempt) for attempt in recent)
        if failures > self.max_restarts:
            return f"max_restarts is {self.max_restarts}, and this was failure {failures}"
        return None

    def pause_s(self, attempts: Sequence[Attempt]) -> float:
        """Return the pause before the next attempt; there is none while steps are made."""
        recent = since_fresh_start(attempts)
        stalls = count_stalls(recent)
        if stalls and (ending := recent[-1].ending) is not None and ending.cause is Cause.STORAGE:
            return LONGEST_PAUSE_S  # a full disk needs time to be cleared
        return 0.0 if stalls < 2 else min(LONGEST_PAUSE_S, 2.0 ** (stalls - 2))

    def bad_hosts(self, attempts: Sequence[Attempt]) -> tuple[str, ...]:
        """Return the hosts to exclude: dirty ones, and those that fail repeatedly."""
        bad: dict[str, None] = {}
        before, in_a_row = "", 0
        for attempt in attempts:
            ending = attempt.ending
            if ending is None or not _is_failure(attempt):
                continue
            in_a_row = in_a_row + 1 if ending.host == before else 1
            before = ending.host
            # A host that made steps can be reached; its connection broke for another reason.
            was_reached = ending.cause is Cause.UNREACHABLE and attempt.last_step is not None
            is_blameless = was_reached or ending.cause in _BLAMELESS
            often = in_a_row >= self.max_host_faults and not is_blameless
            if ending.host and (often or ending.cause is Cause.DIRTY_HOST):
                bad[ending.host] = None
        return tuple(bad)


def since_fresh_start(attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """Return the attempts since the job was last started again after it had ended."""
    first = 0
    for number, attempt in enumerate(attempts[:-1]):
        final = attempt.ending is not None and not attempt.ending.cause.is_worth_restarting
        first = number + 1 if final else first
    return attempts[first:]


def count_stalls(attempts: Sequence[Attempt]) -> int:
    """Return the number of consecutive failures at the end without a new step."""
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


@dataclass(frozen=True, kw_only=True)
class PreemptionHandler:
    """Checkpoint interval and restarts of a preemptible job; set with keywords or step by step.

    ```python
    PreemptionHandler(checkpoint_frequency=300, auto_restart=True)
    PreemptionHandler().with_checkpoint_frequency(300).with_auto_restart(True).build()
    ```

    Attributes:
        checkpoint_frequency: Seconds or a timedelta between two checkpoints, which limits the loss.
            None uses the job's own `train.checkpoint_every`.
        auto_restart: Whether the job continues by itself after an eviction, on a pod that replaces
            the lost one.
        on_preemption: Called with the pod that was preempted.
        on_restart: Called with the pod that replaces it.
    """

    checkpoint_frequency: float | timedelta | None = None
    auto_restart: bool = True
    on_preemption: Callable[[Pod], None] | None = None
    on_restart: Callable[[Pod], None] | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise ConfigError(
                f"checkpoint_frequency is {self.checkpoint_frequency}; expected seconds, for "
                "example 300 or timedelta(minutes=5)."
            )

    def with_checkpoint_frequency(self, frequency: float | timedelta) -> Self:
        """Set the checkpoint interval."""
        return replace(self, checkpoint_frequency=frequency)

    def with_auto_restart(self, auto_restart: bool = True) -> Self:
        """Set whether to continue after an eviction."""
        return replace(self, auto_restart=auto_restart)

    def with_callbacks(
        self,
        on_preemption: Callable[[Pod], None] | None = None,
        on_restart: Callable[[Pod], None] | None = None,
    ) -> Self:
        """Set callbacks for a preempted pod and for its replacement."""
        return replace(self, on_preemption=on_preemption, on_restart=on_restart)

    def build(self) -> Self:
        """Return the handler; all values were checked when they were set."""
        return self

    @property
    def seconds(self) -> float | None:
        """The checkpoint interval in seconds."""
        frequency = self.checkpoint_frequency
        return frequency.total_seconds() if isinstance(frequency, timedelta) else frequency

    def to_settings(self) -> dict[str, Any]:
        """Return the job settings it implies, by dotted path."""
        seconds = self.seconds
        return {} if seconds is None else {"train.checkpoint_seconds": seconds}

    def apply(self, job: Job) -> Job:
        """Return the job with these settings.

        Raises:
            ConfigError: The job keeps no checkpoints.
        """
        if self.seconds is not None and not job.train.checkpoint_every:
            raise ConfigError(
                "The job keeps no checkpoints (train.checkpoint_every is 0), so a preemption "
                "would lose everything; remove that key."
            )
        return job.replace(self.to_settings())

    def policy(self, base: Policy | None = None) -> Policy:
        """Return a policy with this handler's restarts."""
        return replace(base or Policy(), auto_restart=self.auto_restart)
