"""Whether the run that was preempted learnt what the undisturbed one did, to the bit."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..beside import Beside
from ..scene import Scene
from .launch import CalmRun
from .preempt import Preempt


@dataclass(frozen=True)
class Resume:
    """The losses of both runs, step by step.

    Attributes:
        undisturbed: By step.
        preempted: By step.
    """

    undisturbed: dict[int, float | None]
    preempted: dict[int, float | None]

    @property
    def different(self) -> list[int]:
        """Steps whose losses are not the same bits, or that one of the runs does not have."""
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

    def beside(self) -> Sequence[Beside]:
        """Both are measured: the sentence says it."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "steps": len(self.undisturbed),
            "equal_to_the_bit": self.is_good,
            "different_steps": self.different,
        }


class ResumeStage:
    """Compares losses."""

    name: ClassVar[str] = "resume"
    question: ClassVar[str] = "Did it go on as if nothing had happened?"

    def run(self, scene: Scene) -> Resume:
        """Hold every loss of one run against the other's."""
        return Resume(scene.find(CalmRun).run.losses, scene.find(Preempt).run.losses)


def _bits(loss: float | None) -> bytes | None:
    """Return a loss as bits: NaN is equal to itself, and 0.0 is not -0.0."""
    return None if loss is None else struct.pack("<d", loss)
