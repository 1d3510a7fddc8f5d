"""`PreemptionHandler`: how a job is kept when its pod may be taken away (document 004)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Self

from ...errors import ConfigError
from ...job.job import Job
from ..pod import Pod
from .policy import Policy


@dataclass(frozen=True, kw_only=True)
class PreemptionHandler:
    """Saves often enough, and goes on elsewhere, in keywords or step by step.

    ```python
    PreemptionHandler(checkpoint_frequency=300, auto_restart=True)
    PreemptionHandler().with_checkpoint_frequency(300).with_auto_restart(True).build()
    ```

    Attributes:
        checkpoint_frequency: Seconds, or a timedelta, from one checkpoint to the next: the most
            that is lost. None leaves it to the job's own `train.checkpoint_every`.
        auto_restart: Whether the job goes on by itself after an eviction, and another pod is asked
            for in place of one that was taken away.
        on_preemption: Called with the pod that was taken away.
        on_restart: Called with the pod that came in its place.
    """

    checkpoint_frequency: float | timedelta | None = None
    auto_restart: bool = True
    on_preemption: Callable[[Pod], None] | None = None
    on_restart: Callable[[Pod], None] | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise ConfigError(
                f"checkpoint_frequency is {self.checkpoint_frequency}; it must be some seconds, "
                "for example 300 or timedelta(minutes=5)."
            )

    def with_checkpoint_frequency(self, frequency: float | timedelta) -> Self:
        """Save this often."""
        return replace(self, checkpoint_frequency=frequency)

    def with_auto_restart(self, auto_restart: bool = True) -> Self:
        """Go on by itself after an eviction, or not."""
        return replace(self, auto_restart=auto_restart)

    def with_callbacks(
        self,
        on_preemption: Callable[[Pod], None] | None = None,
        on_restart: Callable[[Pod], None] | None = None,
    ) -> Self:
        """Call these when a pod is taken away, and when another one has come."""
        return replace(self, on_preemption=on_preemption, on_restart=on_restart)

    def build(self) -> Self:
        """Return it; everything was checked as it was given."""
        return self

    @property
    def seconds(self) -> float | None:
        """The frequency in seconds."""
        frequency = self.checkpoint_frequency
        return frequency.total_seconds() if isinstance(frequency, timedelta) else frequency

    def to_settings(self) -> dict[str, Any]:
        """The keys of a job that it sets, by dotted path."""
        seconds = self.seconds
        return {} if seconds is None else {"train.checkpoint_seconds": seconds}

    def apply(self, job: Job) -> Job:
        """Return the job with these settings.

        Raises:
            ConfigError: The job says that it keeps no checkpoints.
        """
        if self.seconds is not None and not job.train.checkpoint_every:
            raise ConfigError(
                "The job keeps no checkpoints (train.checkpoint_every is 0), so nothing of it "
                "would outlast a preemption; leave that key out."
            )
        return job.replace(self.to_settings())

    def policy(self, base: Policy | None = None) -> Policy:
        """Return when the job is started again."""
        return replace(base or Policy(), auto_restart=self.auto_restart)
