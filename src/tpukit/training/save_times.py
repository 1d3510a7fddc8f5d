"""After which steps a run saves: every so many, or about every so many seconds."""

import statistics
from itertools import islice

from ..runtime.multihost import said_by_first

TIMED_AFTER = 3  # steps, before the first of which is known how long they take
RECENT = 20


class SaveTimes:
    """Says when a checkpoint is due; all processes of a run get the same answer.

    Clocks of processes differ, and all must save after the same step. So seconds are made into
    steps, from how long recent ones took on process 0, anew at each checkpoint.

    Args:
        every: Steps from one to the next; 0 is never.
        seconds: Seconds from one to the next, instead of steps.
        first: The step that the run begins after.
    """

    def __init__(self, every: int, seconds: float | None, *, first: int) -> None:
        self._every, self._seconds = every, seconds
        self._next = first + TIMED_AFTER
        self._is_timed = False

    def is_due(self, step: int, step_times_s: dict[int, float]) -> bool:
        """Whether to save after this step; every process must ask after every step."""
        if not self._every or self._seconds is None:
            return bool(self._every) and step % self._every == 0
        if step < self._next:
            return False
        due, self._is_timed = self._is_timed, True
        recent = list(islice(reversed(step_times_s.values()), RECENT))
        took = statistics.fmean(recent) if recent else self._seconds
        self._next = step + said_by_first(max(1, round(self._seconds / max(took, 1e-6))))
        return due
