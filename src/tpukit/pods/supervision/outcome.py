"""How a job ended, over all its attempts."""

from dataclasses import dataclass
from typing import Any

from ...shown import Shown
from ..causes import Cause, Ending
from .journal import Attempt, Loss


@dataclass(frozen=True, kw_only=True)
class Outcome(Shown):
    """How a job ended.

    Attributes:
        ending: Of its last attempt.
        reason: Why it was not started again.
        losses: What each interruption cost.
    """

    job: str
    ending: Ending
    reason: str
    attempts: tuple[Attempt, ...]
    losses: tuple[Loss, ...]

    @property
    def is_done(self) -> bool:
        """Whether the job ran to its end."""
        return self.ending.cause is Cause.DONE

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "job": self.job,
            "done": self.is_done,
            "ending": self.ending.to_dict(),
            "reason": self.reason,
            "attempts": [attempt.to_dict() for attempt in self.attempts],
            "losses": [loss.to_dict() for loss in self.losses],
        }

    def __rich__(self) -> str:
        tries = len(self.attempts)
        return f"{self.job}: {self.ending} after {tries} attempt{'s' * (tries > 1)} ({self.reason})"
