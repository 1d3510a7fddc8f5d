"""What bounds a step that ran here, beside what the compiled schedule says of one on a TPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...hardware.figure import Figure, seconds_text
from ...observe.profiling.analysis import BottleneckAnalysis
from ...observe.profiling.comparison import StepComparison, compare
from ...observe.profiling.profile import read_newest
from ...observe.profiling.steps import predicted_step
from ..beside import Beside, measured
from ..scene import Scene
from .check import Check
from .launch import CalmRun


@dataclass(frozen=True)
class ProfileResult:
    """A recorded step.

    Attributes:
        comparison: With the predicted one, by shares; None where there is no prediction.
    """

    analysis: BottleneckAnalysis
    step_s: float
    comparison: StepComparison | None

    is_good = True

    @property
    def sentence(self) -> str:
        """What bounds it here."""
        shares = sorted(self.analysis.shares.items(), key=lambda one: -one[1])[:2]
        bound = ", ".join(f"{share:.0%} {kind}" for kind, share in shares)
        matched = ""
        if self.comparison is not None:
            matched = f"; {len(self.comparison.ops)} ops have a partner in the predicted step"
        return (
            f"a recorded step of {seconds_text(self.step_s)} on {self.analysis.where}: {bound} "
            f"(measured){matched}"
        )

    @property
    def predicted_shares(self) -> Mapping[str, float]:
        """By kind, of the predicted step; nothing where there is none."""
        if self.comparison is None:
            return {}
        spent = self.comparison.predicted.seconds_by_kind
        whole = sum(spent.values()) or 1.0
        return {kind: seconds / whole for kind, seconds in spent.items()}

    def beside(self) -> Sequence[Beside]:
        """Shares of the step by kind, of two machines."""
        source = "timeline of the compiled schedule"
        return [
            Beside(
                what=f"share of a step: {kind}",
                predicted=Figure(share, "share", "model", source),
                predicted_of="" if self.comparison is None else self.comparison.predicted.where,
                measured=measured(self.analysis.shares.get(kind, 0.0), "share", "the recording"),
                measured_on=self.analysis.where,
                is_comparable=False,
            )
            for kind, share in self.predicted_shares.items()
            if max(share, self.analysis.shares.get(kind, 0.0)) >= 0.005
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "analysis": self.analysis.to_dict(),
            "step_s": self.step_s,
            "comparison": None if self.comparison is None else self.comparison.to_dict(),
        }


class ProfileStage:
    """Reads what the run's own profile hook recorded."""

    name: ClassVar[str] = "profile"
    question: ClassVar[str] = "What bounds a step?"

    def run(self, scene: Scene) -> ProfileResult:
        """Read the recording of the undisturbed run, and hold the prediction beside it."""
        found = read_newest(scene.find(CalmRun).run.folder)
        checked = next((one for one in scene.findings if isinstance(one, Check)), None)
        comparison = None
        if checked is not None and checked.rehearsed.prediction is not None:
            comparison = compare(predicted_step(checked.rehearsed), found.step)
        return ProfileResult(found.analysis, found.step.step_time_s, comparison)
