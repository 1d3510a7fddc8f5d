"""How long a run that is interrupted should take, from what one start and one step take."""

from dataclasses import dataclass

from ..hardware.figure import Figure

SOURCE = "start, step and save as measured before the first preemption, times how often each comes"


@dataclass(frozen=True, kw_only=True)
class InterruptedRun:
    """A run with interruptions, by arithmetic.

    Attributes:
        steps: Of the run.
        step_s: Of one of them.
        ready_s: From the beginning of its first attempt to the first step.
        start_s: From the start of processes to their first step, each time they start again.
        save_s: For which one checkpoint holds the loop up.
        every: Steps from one checkpoint to the next.
        noticed: Interruptions before which it can save: nothing is done again.
        killed: Interruptions without a word: half of `every` is done again in the mean.
    """

    steps: int
    step_s: float
    ready_s: float
    start_s: float
    save_s: float
    every: int
    noticed: int
    killed: int

    @property
    def redone_steps(self) -> float:
        """Steps that are done again, in the mean."""
        return self.killed * (self.every - 1) / 2

    @property
    def productive_s(self) -> float:
        """Seconds in steps that count."""
        return self.steps * self.step_s

    @property
    def wall_s(self) -> float:
        """From the beginning of the first attempt to the last step."""
        starts = self.ready_s + (self.noticed + self.killed) * self.start_s
        saves = (self.steps // self.every + self.noticed) * self.save_s
        return starts + saves + self.productive_s + self.redone_steps * self.step_s

    @property
    def goodput(self) -> Figure:
        """Time in steps that count over all of it."""
        return Figure(self.productive_s / self.wall_s, "share", "model", SOURCE)

    @property
    def wall(self) -> Figure:
        """All of it."""
        return Figure(self.wall_s, "s", "model", SOURCE)
