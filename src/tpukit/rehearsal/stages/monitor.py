"""What watching a run shows: goodput and host figures, and what bounds a recorded step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...hardware.figure import Figure, bytes_text, seconds_text
from ...observe.profiling.analysis import BottleneckAnalysis
from ...observe.profiling.comparison import StepComparison, compare
from ...observe.profiling.profile import read_newest
from ...observe.profiling.steps import predicted_step
from ...observe.runs.goodput import RunGoodput, label_of
from ...observe.runs.run import Run
from ...observe.runs.summary import RunSummary
from ..stage import Beside, Scene, StageResult, measured
from .check import Check
from .launch import CalmRun
from .preempt import Preempt

_HOST = ("host_cpu_utilization", "host_memory_used")


@dataclass(frozen=True)
class Monitor(StageResult):
    """The readings of each attempt's monitor, and the run's own records.

    Attributes:
        readings: Number of host readings, over all attempts.
        busiest: The highest CPU utilization; None without readings.
        fullest_bytes: The most host memory in use.
        hosts: Number of hosts with records.
        stragglers: The verdict on slow hosts.
    """

    summary: RunSummary
    goodput: RunGoodput
    readings: int
    busiest: float | None
    fullest_bytes: float | None
    hosts: int
    stragglers: str
    _facts = (
        "summary",
        "goodput",
        "readings",
        ("host_cpu_at_most", "busiest"),
        ("host_memory_bytes_at_most", "fullest_bytes"),
        "hosts",
        "stragglers",
    )

    @property
    def is_good(self) -> bool:
        """Whether there are readings."""
        return self.readings > 0

    @property
    def sentence(self) -> str:
        """Goodput, its largest loss, and the host's figures."""
        cause, seconds = next(iter(self.goodput.badput_s.items()), ("other", 0.0))
        share = self.goodput.share or 0.0
        host = "no reading of the host"
        if self.busiest is not None and self.fullest_bytes is not None:
            host = (
                f"{self.readings} readings of the host, processors up to {self.busiest:.0%}, "
                f"memory up to {bytes_text(self.fullest_bytes)}"
            )
        return (
            f"goodput {share:.1%} over {self.goodput.attempts} attempts, most of the rest is "
            f"{label_of(cause)} ({seconds:.1f} s); {host} (measured)"
        )


class MonitorStage:
    """Reads the records of the preempted run."""

    name: ClassVar[str] = "monitor"
    question: ClassVar[str] = "What does watching it show?"

    def run(self, scene: Scene) -> Monitor:
        """Read the preempted run's directory."""
        run = Run(scene.find(Preempt).run.folder)
        busy, used = (_most(run, metric) for metric in _HOST)
        return Monitor(
            summary=run.summary(),
            goodput=run.goodput(),
            readings=used[1],
            busiest=busy[0],
            fullest_bytes=used[0],
            hosts=len(run.processes()),
            stragglers=str(run.stragglers()),
        )


def _most(run: Run, metric: str) -> tuple[float | None, int]:
    """Return the greatest value of a metric of the first host, and its number of readings."""
    if metric not in run.metrics():
        return None, 0
    values = run.series(metric, by="time").y
    values = values[values == values]  # gaps
    return (float(values.max()), len(values)) if len(values) else (None, 0)


@dataclass(frozen=True)
class ProfileResult(StageResult):
    """A recorded step.

    Attributes:
        comparison: Comparison with the predicted step by shares; None without a prediction.
    """

    analysis: BottleneckAnalysis
    step_s: float
    comparison: StepComparison | None

    @property
    def sentence(self) -> str:
        """What bounds the step on this machine."""
        shares = sorted(self.analysis.shares.items(), key=lambda entry: -entry[1])[:2]
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
        """Shares of the predicted step by kind; empty without a prediction."""
        if self.comparison is None:
            return {}
        spent = self.comparison.predicted.seconds_by_kind
        whole = sum(spent.values()) or 1.0
        return {kind: seconds / whole for kind, seconds in spent.items()}

    def beside(self) -> Sequence[Beside]:
        """Return shares of the step by kind, predicted beside measured."""
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


class ProfileStage:
    """Reads the recording of the run's profile hook."""

    name: ClassVar[str] = "profile"
    question: ClassVar[str] = "What bounds a step?"

    def run(self, scene: Scene) -> ProfileResult:
        """Read the recording of the uninterrupted run, and compare it with the prediction."""
        profile = read_newest(scene.find(CalmRun).run.folder)
        checked = next((finding for finding in scene.findings if isinstance(finding, Check)), None)
        comparison = None
        if checked is not None and checked.rehearsed.prediction is not None:
            comparison = compare(predicted_step(checked.rehearsed), profile.step)
        return ProfileResult(profile.analysis, profile.step.step_time_s, comparison)
