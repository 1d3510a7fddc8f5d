"""What every stage of a rehearsal is, and what it leaves: one protocol, many citizens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from .beside import Beside

if TYPE_CHECKING:
    from .scene import Scene

Verdict = Literal["passed", "failed", "left out"]


class StageResult(Protocol):
    """What a stage found."""

    @property
    def sentence(self) -> str:
        """The finding in one sentence."""
        ...

    @property
    def is_good(self) -> bool:
        """Whether the job stood the stage."""
        ...

    def beside(self) -> Sequence[Beside]:
        """What was predicted, beside what was measured."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        ...


class Stage(Protocol):
    """One part of a job's life.

    A new stage is a class with these and a line in `rehearse.STAGES`.
    """

    name: ClassVar[str]
    question: ClassVar[str]

    def run(self, scene: "Scene") -> StageResult:
        """Play it.

        Raises:
            TPUError: It cannot be played; the message says why, and the rehearsal goes on.
            LeftOut: It does not apply to this job, or needs a stage that failed.
        """
        ...


class LeftOut(Exception):
    """A stage does not apply to a job, or needs what a stage before it did not find."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """A stage that is over.

    Attributes:
        began: Unix seconds.
        seconds: On the clock.
        processor_s: Processor time of this process and of children that ended in it.
        finding: None where it failed or was left out, and then `why` says so.
    """

    name: str
    question: str
    began: float
    seconds: float
    processor_s: float
    finding: StageResult | None = None
    verdict: Verdict = "passed"
    why: str = ""

    @property
    def sentence(self) -> str:
        """What became of it."""
        return self.why if self.finding is None else self.finding.sentence

    def beside(self) -> Iterator[Beside]:
        """Its pairs of figures."""
        yield from () if self.finding is None else self.finding.beside()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "stage": self.name,
            "question": self.question,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "began": self.began,
            "seconds": {"value": self.seconds, "unit": "s", "origin": "measured"},
            "processor": {"value": self.processor_s, "unit": "s", "origin": "measured"},
            "found": None if self.finding is None else self.finding.to_dict(),
        }
