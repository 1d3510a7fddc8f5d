"""The same job with its pod taken away twice: once after a notice, once without a word."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import TPUError
from ...hardware.figure import Figure, seconds_text
from ...pods.causes import Kind
from ...pods.providers.protocol import StepCompleted
from ..beside import Beside, measured
from ..goodput_model import InterruptedRun
from ..launched import LaunchedRun, launch_here
from ..scene import Scene
from .launch import CalmRun

NAME = "preempted"
NOTICE_S = 20.0
PREEMPTIONS = 2


class NotPreempted(TPUError):
    """The run was over before its pod could be taken away."""


@dataclass(frozen=True)
class Preempt:
    """A run that lost its pod twice and came to its end.

    Attributes:
        predicted: How long it should take, by what was known before the first preemption.
        leftovers: What the cloud still holds; nothing is as it should be.
    """

    run: LaunchedRun
    predicted: InterruptedRun
    leftovers: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing was left behind."""
        return not self.leftovers

    @property
    def sentence(self) -> str:
        """What it cost to be preempted."""
        losses = self.run.outcome.losses
        again = sum(loss.lost_steps for loss in losses)
        down = ", ".join(seconds_text(loss.downtime_s or 0.0) for loss in losses)
        left = f"; LEFT BEHIND: {', '.join(self.leftovers)}" if self.leftovers else ""
        return (
            f"taken away {len(losses)} times, back to the next step after {down}; {again} steps "
            f"done again, {len(self.run.outcome.attempts)} pods, none left (measured){left}"
        )

    def beside(self) -> Sequence[Beside]:
        """Time, goodput and steps done again."""
        source = "the run's own books, over all attempts"
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
                what="steps done again",
                predicted=Figure(
                    self.predicted.redone_steps, "steps", "model", "half the steps between saves"
                ),
                predicted_of="any machine",
                measured=measured(again, "steps", source),
                is_comparable=True,
                remark=f"it saves every {self.predicted.every}; a save under way is lost too",
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**self.run.to_dict(), "leftovers": list(self.leftovers)}


class PreemptStage:
    """Takes the pod away, with a notice and without."""

    name: ClassVar[str] = "preempt"
    question: ClassVar[str] = "What if its pod is taken away, with a notice and without?"

    def run(self, scene: Scene) -> Preempt:
        """Launch the same job, take its pod away twice, and follow it to its end.

        Raises:
            NotPreempted: It was over first.
        """
        calm = scene.find(CalmRun).run
        steps = scene.stand_in.job.train.steps or 1
        # Off a save, so that something is lost where nobody gives notice.
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
                how = f"with {notice_s:g} s of notice" if notice_s else "without a word"
                text = f"{pod} is taken away {how}, at step {event.step}"
                scene.note(NAME, "preempted", text)
                scene.progress(text)

        found = launch_here(scene, NAME, on_step=on_step)
        evicted = [
            one
            for one in found.outcome.attempts
            if one.ending is not None and one.ending.cause.kind is Kind.EVICTION
        ]
        if len(evicted) < PREEMPTIONS:
            raise NotPreempted(
                f"the run was over with {len(evicted)} of {PREEMPTIONS} preemptions; give it more "
                f"steps than {steps} (--steps)."
            )
        goodput = calm.goodput.total
        saves = max(1, steps // every)
        predicted = InterruptedRun(
            steps=steps,
            step_s=goodput.productive_s / steps,
            ready_s=found.ready_s,
            start_s=found.start_s,
            save_s=goodput.spent_s.get("checkpoint", 0.0) / saves,
            every=every,
            noticed=1,
            killed=PREEMPTIONS - 1,
        )
        return Preempt(found, predicted, tuple(scene.cloud.leftovers))
