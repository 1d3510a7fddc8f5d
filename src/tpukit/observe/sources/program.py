"""Steps of a loop of one's own, told to the monitor as they complete."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..readings import Reading, ReadingBuilder

WANTED = ("step", "step_time_seconds", "loss", "tflops", "samples_per_second")
SILENT_S, SILENT_STEPS = 60.0, 20


@dataclass(frozen=True)
class _Step:
    number: int
    completed_at: float
    took_s: float | None
    loss: float | None
    flops: float | None
    samples: float | None


class ProgramSource:
    """Keeps the newest step that the program told it of.

    Args:
        process: Index of the process of the run.
        clock: Seconds that only go forward.
    """

    name = "program"

    def __init__(self, *, process: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._process, self._clock = process, clock
        self._newest: _Step | None = None

    def record(
        self,
        step: int | None = None,
        *,
        loss: float | None = None,
        flops: float | None = None,
        samples: float | None = None,
    ) -> None:
        """Take note that a step has completed now; it took the time since the one before it.

        Args:
            step: Its number; one more than that of the step before by default.
            loss: Of the step.
            flops: Of the model in this step, on all chips together.
            samples: Sequences in this step, on all chips together.
        """
        now, before = self._clock(), self._newest
        self._newest = _Step(
            number=step if step is not None else 1 if before is None else before.number + 1,
            completed_at=now,
            took_s=None if before is None else now - before.completed_at,
            loss=loss,
            flops=flops,
            samples=samples,
        )

    def read(self) -> Reading:
        """Return the newest step, unless there has been none for long."""
        found = ReadingBuilder(self.name, WANTED, process=self._process)
        step = self._newest
        if step is None:
            return found.build(otherwise="the program has recorded no step yet")
        silent_s = self._clock() - step.completed_at
        if silent_s > max(SILENT_S, SILENT_STEPS * (step.took_s or 0.0)):
            return found.build(otherwise=f"the program has recorded no step for {silent_s:.0f} s")
        found.add("step", step.number)
        if step.loss is not None:
            found.add("loss", step.loss)
        if step.took_s:
            found.add("step_time_seconds", step.took_s)
            if step.flops is not None:
                found.add("tflops", step.flops / step.took_s / 1e12)
            if step.samples is not None:
                found.add("samples_per_second", step.samples / step.took_s)
            return found.build(otherwise="the program does not record it")
        return found.build(otherwise="a second step is needed to know how long one takes")

    def close(self) -> None:
        """Do nothing: nothing is open."""
