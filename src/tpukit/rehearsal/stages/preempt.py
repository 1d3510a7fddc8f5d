"""Preempt the same job twice, with a notice and without, and compare its losses to the bit."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...errors import TPUError
from ...hardware.figure import Figure, seconds_text
from ...pods.causes import Kind
from ...pods.providers.protocol import StepCompleted
from ..stage import Beside, Scene, StageResult, measured
from .launch import CalmRun, LaunchedRun, launch_here

SOURCE = "start, step and save as measured before the first preemption, times how often each comes"


@dataclass(frozen=True, kw_only=True)
class InterruptedRun:
    """A run with interruptions, predicted by arithmetic.

    Attributes:
        steps: Steps of the run.
        step_s: Seconds of a step.
        ready_s: Seconds from the beginning of the first attempt to its first step.
        start_s: Seconds from the start of processes to their first step, at each restart.
        save_s: Seconds for which a checkpoint blocks the loop.
        every: Steps from one checkpoint to the next.
        noticed: Interruptions with a notice, before which it saves; no step is repeated.
        killed: Interruptions without a notice; half of `every` steps are repeated on average.
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
        """Expected number of repeated steps."""
        return self.killed * (self.every - 1) / 2

    @property
    def productive_s(self) -> float:
        """Seconds in steps that count."""
        return self.steps * self.step_s

    @property
    def wall_s(self) -> float:
        """Seconds from the beginning of the first attempt to the last step."""
        starts = self.ready_s + (self.noticed + self.killed) * self.start_s
        saves = (self.steps // self.every + self.noticed) * self.save_s
        return starts + saves + self.productive_s + self.redone_steps * self.step_s

    @property
    def goodput(self) -> Figure:
        """Productive time over wall time."""
        return Figure(self.productive_s / self.wall_s, "share", "model", SOURCE)

    @property
    def wall(self) -> Figure:
        """Wall time as a figure."""
        return Figure(self.wall_s, "s", "model", SOURCE)


NAME = "preempted"
NOTICE_S = 20.0
PREEMPTIONS = 2


class NotPreempted(TPUError):
    """The run ended before its pod could be preempted."""


@dataclass(frozen=True)
class Preempt(StageResult):
    """A run that was preempted twice and finished.

    Attributes:
        predicted: The prediction made before the first preemption.
        leftovers: Resources that still exist in the cloud; none is expected.
    """

    run: LaunchedRun
    predicted: InterruptedRun
    leftovers: tuple[str, ...]
    _facts = "**run leftovers"

    @property
    def is_good(self) -> bool:
        """Whether no resource is left in the cloud."""
        return not self.leftovers

    @property
    def sentence(self) -> str:
        """The cost of the preemptions: downtime and repeated steps."""
        losses = self.run.outcome.losses
        again = sum(loss.lost_steps for loss in losses)
        down = ", ".join(seconds_text(loss.downtime_s or 0.0) for loss in losses)
        left = f"; LEFT BEHIND: {', '.join(self.leftovers)}" if self.leftovers else ""
        return (
            f"preempted {len(losses)} times, back to the next step after {down}; {again} steps "
            f"repeated, {len(self.run.outcome.attempts)} pods, none left (measured){left}"
        )

    def beside(self) -> Sequence[Beside]:
        """Return wall time, goodput and repeated steps, predicted beside measured."""
        source = "the run's own records, over all attempts"
        books = self.run.goodput.total
        again = sum(loss.lost_steps for loss in self.run.outcome.losses)
        here = "this machine, by arithmetic"
        return (
            Beside(
                what="wall time, preempted twice",
                predicted=self.predicted.wall,
                predicted_of=here,
                measured=measured(books.wall_s, "s", source),
                is_comparable=True,
            ),
            Beside(
                what="goodput, preempted twice",
                predicted=self.predicted.goodput,
                predicted_of=here,
                measured=measured(books.share or 0.0, "share", source),
                is_comparable=True,
                remark="of a run of seconds, most of which are starts; of one of days it is high",
            ),
            Beside(
                what="steps repeated",
                predicted=Figure(
                    self.predicted.redone_steps, "steps", "model", "half the steps between saves"
                ),
                predicted_of="any machine",
                measured=measured(again, "steps", source),
                is_comparable=True,
                remark=f"it saves every {self.predicted.every}; an unfinished save is lost too",
            ),
        )


class PreemptStage:
    """Preempts the pod, with a notice and without."""

    name: ClassVar[str] = "preempt"
    question: ClassVar[str] = "What if its pod is preempted, with a notice and without?"

    def run(self, scene: Scene) -> Preempt:
        """Launch the same job, preempt its pod twice, and follow it to its end.

        Raises:
            NotPreempted: It ended too early.
        """
        calm = scene.find(CalmRun).run
        steps = scene.stand_in.job.train.steps or 1
        # Between two saves, so that a kill loses steps.
        every = scene.stand_in.job.train.checkpoint_every
        due = [(steps // 3, NOTICE_S), (2 * steps // 3 + every // 2, 0.0)]
        taken: list[int] = []

        def on_step(event: StepCompleted) -> None:
            number = len(taken)
            if number == len(due) or event.step < due[number][0]:
                return
            pod, notice_s = f"{NAME}-a{number + 1}", due[number][1]
            if scene.cloud.preempt(pod, notice_s=notice_s):
                taken.append(event.step)
                how = f"with {notice_s:g} s of notice" if notice_s else "without notice"
                text = f"{pod} is preempted {how}, at step {event.step}"
                scene.note(NAME, "preempted", text)
                scene.progress(text)

        run = launch_here(scene, NAME, on_step=on_step)
        evicted = [
            attempt
            for attempt in run.outcome.attempts
            if attempt.ending is not None and attempt.ending.cause.kind is Kind.EVICTION
        ]
        if len(evicted) < PREEMPTIONS:
            raise NotPreempted(
                f"the run ended after {len(evicted)} of {PREEMPTIONS} preemptions; give it more "
                f"steps than {steps} (--steps)."
            )
        goodput = calm.goodput.total
        saves = max(1, steps // every)
        predicted = InterruptedRun(
            steps=steps,
            step_s=goodput.productive_s / steps,
            ready_s=run.ready_s,
            start_s=run.start_s,
            save_s=goodput.spent_s.get("checkpoint", 0.0) / saves,
            every=every,
            noticed=1,
            killed=PREEMPTIONS - 1,
        )
        return Preempt(run, predicted, tuple(scene.cloud.leftovers))


@dataclass(frozen=True)
class Resume(StageResult):
    """The losses of both runs, step by step.

    Attributes:
        undisturbed: Losses of the uninterrupted run by step.
        preempted: Losses of the preempted run by step.
    """

    undisturbed: dict[int, float | None]
    preempted: dict[int, float | None]
    _facts = ("steps", ("equal_to_the_bit", "is_good"), ("different_steps", "different"))

    @property
    def steps(self) -> int:
        """How many steps the undisturbed run took."""
        return len(self.undisturbed)

    @property
    def different(self) -> list[int]:
        """Steps whose losses differ in a bit, or that one of the runs lacks."""
        steps = sorted({*self.undisturbed, *self.preempted})
        return [
            step
            for step in steps
            if _bits(self.undisturbed.get(step)) != _bits(self.preempted.get(step))
        ]

    @property
    def is_good(self) -> bool:
        """Whether there are losses, and all are equal to the bit."""
        return bool(self.undisturbed) and not self.different

    @property
    def sentence(self) -> str:
        """How many losses are equal."""
        if self.is_good:
            return f"all {len(self.undisturbed)} losses are equal to the bit (measured)"
        wrong = self.different
        if not wrong:
            return "there are no losses to compare"
        first = wrong[0]
        return (
            f"{len(wrong)} of {len(self.undisturbed)} losses differ, first at step {first}: "
            f"{self.undisturbed.get(first)} undisturbed, {self.preempted.get(first)} preempted"
        )


class ResumeStage:
    """Compares losses."""

    name: ClassVar[str] = "resume"
    question: ClassVar[str] = "Did it resume without a difference?"

    def run(self, scene: Scene) -> Resume:
        """Compare the losses of both runs."""
        return Resume(scene.find(CalmRun).run.losses, scene.find(Preempt).run.losses)


def _bits(loss: float | None) -> bytes | None:
    """Return a loss as bits, so that NaN equals itself and 0.0 differs from -0.0."""
    return None if loss is None else struct.pack("<d", loss)
