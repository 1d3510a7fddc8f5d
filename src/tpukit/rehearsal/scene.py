"""What the stages of one rehearsal share: the job, its stand-in, a folder, a cloud, findings."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..job.job import Job
from ..runtime.progress import Progress, silent
from .cloud import EmulatedCloud
from .stage import LeftOut, StageResult
from .stand_in import StandIn

Found = TypeVar("Found", bound=StageResult)


@dataclass(frozen=True)
class Moment:
    """Something that happened while a job ran.

    Attributes:
        at: Unix seconds.
        of: The run it belongs to, or the stage.
        kind: "pod", "attempt", "preempted", "saved" or "step", for whoever draws it.
    """

    at: float
    of: str
    kind: str
    text: str

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return dict(vars(self))


@dataclass
class Scene:
    """What the stages share.

    Attributes:
        job: As it was given.
        stand_in: What runs here in its place, or the job itself where it is small.
        folder: Where runs and models are left.
        cloud: The emulated one.
        moments: What happened, in order.
    """

    job: Job
    stand_in: StandIn
    folder: Path
    cloud: EmulatedCloud
    progress: Progress = silent
    moments: list[Moment] = field(default_factory=list[Moment])
    findings: list[StageResult] = field(default_factory=list[StageResult])

    def find(self, kind: type[Found]) -> Found:
        """Return what an earlier stage found.

        Raises:
            LeftOut: That stage did not come to its end.
        """
        for finding in self.findings:
            if isinstance(finding, kind):
                return finding
        raise LeftOut(f"left out: it needs what '{kind.__name__.lower()}' did not find")

    def note(self, of: str, kind: str, text: str, *, at: float | None = None) -> None:
        """Write down what happened, now unless `at` says when."""
        self.moments.append(Moment(time.time() if at is None else at, of, kind, text))
