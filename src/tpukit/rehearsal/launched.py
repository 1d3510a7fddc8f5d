"""A run launched on the emulated cloud: what the supervisor said, and what its folder holds."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TPUError
from ..job.job import Job
from ..observe.runs.goodput import RunGoodput
from ..observe.runs.run import Run
from ..pods.cost import CostReport
from ..pods.launching.launch import prepare_launch
from ..pods.launching.run_log import RunLogEntry
from ..pods.providers.protocol import Line, StepCompleted
from ..pods.supervision.events import SupervisionEvent
from ..pods.supervision.outcome import Outcome
from ..records.metrics import read_metrics
from .scene import Scene

SHOWN_STEPS = 20
"""Every so many steps one is said."""
_LAST_WORDS = 5


class RunFailed(TPUError):
    """A launched run did not come to its end."""


@dataclass(frozen=True, kw_only=True)
class LaunchedRun:
    """A run that came to its end.

    Attributes:
        outcome: How, over all its attempts.
        cost: What its pods would have cost, by the price catalogue.
        records: What it wrote of every step, those of evaluations left out.
        goodput: Where its time went, over all attempts.
        began: Unix seconds of its first `train()`.
        checkpoint_bytes: Of the newest checkpoint, all its files.
    """

    name: str
    job: Job
    folder: Path
    outcome: Outcome
    cost: CostReport
    records: tuple[dict[str, Any], ...]
    goodput: RunGoodput
    began: float
    checkpoint_bytes: int

    @property
    def losses(self) -> dict[int, float | None]:
        """The loss of every step; None where it was not finite."""
        return {one["step"]: one["loss"] for one in self.records}

    @property
    def start_s(self) -> float:
        """From the start of the first process to its first step."""
        first = self.outcome.attempts[0]
        return (first.first_step_at or 0.0) - (first.started_at or 0.0)

    @property
    def ready_s(self) -> float:
        """The part of it that the run's own books count: from `train()` to the first step."""
        return (self.outcome.attempts[0].first_step_at or 0.0) - self.began

    @property
    def step_s(self) -> float:
        """A step, the median."""
        return statistics.median(one["step_time_s"] for one in self.records)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "outcome": self.outcome.to_dict(),
            "cost": self.cost.to_dict(),
            "goodput": self.goodput.to_dict(),
            "losses": {str(step): loss for step, loss in self.losses.items()},
        }


def launch_here(
    scene: Scene, name: str, *, on_step: Callable[[StepCompleted], None] | None = None
) -> LaunchedRun:
    """Launch what stands in for the job on the emulated cloud, and follow it to its end.

    Args:
        scene: Of the rehearsal.
        name: Of the run and of its folder.
        on_step: Called with every step that is completed.

    Raises:
        RunFailed: It did not come to its end.
    """
    folder = scene.folder / name
    said = {**scene.stand_in.job.to_dict()}
    said["train"] = {**said["train"], "run_dir": str(folder.absolute())}
    said["launch"] = {
        **scene.cloud.launch_section(scene.stand_in.job.slice),
        "include": scene.job.launch.include,
    }
    ready = prepare_launch(
        Job.from_dict(said), name=name, state=scene.cloud.store, progress=scene.progress
    )
    words: list[str] = []

    def tell(event: SupervisionEvent) -> None:
        entry = RunLogEntry.of(event)
        if isinstance(event, StepCompleted):
            if event.step == 1 or event.step % SHOWN_STEPS == 0:
                loss = "" if event.loss is None else f", loss {event.loss:.4f}"
                scene.progress(f"step {event.step} of {ready.job.train.steps}{loss}")
            if on_step is not None:
                on_step(event)
        elif isinstance(event, Line):
            words.append(event.text)
        elif entry is not None:
            scene.note(name, entry.kind, entry.text, at=entry.at)
            scene.progress(entry.text)

    outcome = ready.run(tell)
    if not outcome.is_done:
        said_last = " / ".join(line for line in words[-_LAST_WORDS:] if line.strip())
        raise RunFailed(f"{name} ended: {outcome.ending} ({outcome.reason}). {said_last}")
    run = Run(folder)
    for event in run.events():
        if event.event in ("saved", "rolled back", "recompiled"):
            scene.note(name, "saved", f"{event.event} step {event.data.get('step')}", at=event.time)
    scene.moments.sort(key=lambda moment: moment.at)
    return LaunchedRun(
        name=name,
        job=ready.job,
        folder=folder,
        outcome=outcome,
        cost=CostReport.of(scene.cloud.store, name),
        records=tuple(one for one in read_metrics(folder) if "step_time_s" in one),
        goodput=run.goodput(),
        began=run.attempts()[0].began,
        checkpoint_bytes=_newest_checkpoint_bytes(folder / "checkpoints"),
    )


def _newest_checkpoint_bytes(folder: Path) -> int:
    saved = [one for one in folder.iterdir() if one.name.isdigit()]
    newest = max(saved, key=lambda one: int(one.name))
    return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
