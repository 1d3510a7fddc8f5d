"""A stage of a rehearsal, its result, predicted figures beside measured ones, and shared state."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Protocol, TypeVar

from ..hardware.figure import Figure, seconds_text
from ..job.job import Job
from ..plain_data import JsonObject
from ..runtime.progress import Progress, silent
from ..shown import Facts
from .cloud import EmulatedCloud
from .stand_in import StandIn

THIS_MACHINE = "this machine's CPU"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A predicted figure beside a measured one.

    Attributes:
        what: The quantity.
        predicted: The predicted figure.
        predicted_of: The machine or arithmetic that it is predicted for.
        measured: The measured figure.
        measured_on: The machine it was measured on.
        is_comparable: Whether the two can be compared, unlike a prediction for a TPU and a
            measurement on a CPU.
        remark: An explanation of the pair.
    """

    what: str
    predicted: Figure
    predicted_of: str
    measured: Figure
    measured_on: str = THIS_MACHINE
    is_comparable: bool
    remark: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where they cannot be compared, or one is missing."""
        if not self.is_comparable or not self.predicted.value or self.measured.value is None:
            return None
        return self.measured.value / self.predicted.value

    @property
    def ratio_text(self) -> str:
        """The ratio as text."""
        if not self.is_comparable:
            return "different machines"
        return "–" if self.ratio is None else f"{self.ratio:.3g} ×"

    def to_dict(self) -> JsonObject:
        """Return the result as plain data."""
        return {
            "what": self.what,
            "predicted": {**self.predicted.to_dict(), "of": self.predicted_of},
            "measured": {**self.measured.to_dict(), "on": self.measured_on},
            "comparable": self.is_comparable,
            "ratio": self.ratio,
            "remark": self.remark,
        }


def figure_text(figure: Figure) -> str:
    """Return a figure as short text: 26.5 ms, 4.12 MiB, 3.2 %."""
    if figure.value is None:
        return "–"
    if figure.unit == "s":
        return seconds_text(figure.value)
    if figure.unit == "share":
        return f"{figure.value:.1%}"
    return figure.text


def measured(value: float, unit: str, source: str) -> Figure:
    """Return a figure of origin "measured"."""
    return Figure(value, unit, "measured", source)


Verdict = Literal["passed", "failed", "left out"]


class StageResult(Facts, ABC):
    """The result of a stage."""

    @property
    @abstractmethod
    def sentence(self) -> str:
        """The result in one sentence."""

    @property
    def is_good(self) -> bool:
        """Whether the job passed the stage."""
        return True

    def beside(self) -> Sequence[Beside]:
        """Return predicted beside measured figures; none by default."""
        return ()


class Stage(Protocol):
    """One stage of a rehearsal.

    A new stage is a class with these members and a line in `rehearse.STAGES`.
    """

    name: ClassVar[str]
    question: ClassVar[str]

    def run(self, scene: "Scene") -> StageResult:
        """Run the stage.

        Raises:
            TPUError: It failed, for the reason in the message; the rehearsal goes on.
            LeftOut: It does not apply to this job, or needs a stage that failed.
        """
        ...


class LeftOut(Exception):
    """A stage does not apply to a job, or needs the result of a stage that did not finish."""


@dataclass(frozen=True, kw_only=True)
class Played(Facts):
    """A finished stage.

    Attributes:
        began: Unix seconds.
        seconds: Wall time.
        processor_s: CPU seconds of this process and of its finished children.
        finding: Its result; None where it failed or was left out, with the reason in `why`.
    """

    name: str
    question: str
    began: float
    seconds: float
    processor_s: float
    finding: StageResult | None = None
    verdict: Verdict = "passed"
    why: str = ""
    _facts = "stage=name question verdict sentence began found=finding"

    @property
    def sentence(self) -> str:
        """Its result, or why there is none, in one sentence."""
        return self.why if self.finding is None else self.finding.sentence

    def beside(self) -> Iterator[Beside]:
        """Yield its predicted and measured figures."""
        yield from () if self.finding is None else self.finding.beside()

    def to_dict(self) -> JsonObject:
        """Return the result as plain data."""
        return {
            **super().to_dict(),
            "seconds": {"value": self.seconds, "unit": "s", "origin": "measured"},
            "processor": {"value": self.processor_s, "unit": "s", "origin": "measured"},
        }


Found = TypeVar("Found", bound=StageResult)


@dataclass(frozen=True)
class Moment(Facts):
    """An event while a job ran.

    Attributes:
        at: Unix seconds.
        of: The run or stage it belongs to.
        kind: "pod", "attempt", "preempted", "saved" or "step", for the timeline.
    """

    at: float
    of: str
    kind: str
    text: str


@dataclass
class Scene:
    """The state that stages share.

    Attributes:
        job: As it was given.
        stand_in: The job that is trained on this machine.
        folder: Output folder of runs and models.
        cloud: The emulated cloud.
        moments: Events, in order.
    """

    job: Job
    stand_in: StandIn
    folder: Path
    cloud: EmulatedCloud
    progress: Progress = silent
    moments: list[Moment] = field(default_factory=list[Moment])
    findings: list[StageResult] = field(default_factory=list[StageResult])

    def find(self, kind: type[Found]) -> Found:
        """Return the result of an earlier stage.

        Raises:
            LeftOut: That stage did not finish.
        """
        for finding in self.findings:
            if isinstance(finding, kind):
                return finding
        raise LeftOut(f"left out: it needs the result of '{kind.__name__.lower()}'")

    def note(self, of: str, kind: str, text: str, *, at: float | None = None) -> None:
        """Record an event, of now unless `at` is given."""
        self.moments.append(Moment(time.time() if at is None else at, of, kind, text))
