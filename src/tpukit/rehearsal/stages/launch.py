"""Launch on the emulated cloud: any run of the stand-in, and one without interruption."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...errors import TPUError
from ...hardware.figure import Figure, seconds_text
from ...job.job import Job
from ...observe.runs.goodput import RunGoodput
from ...observe.runs.run import Run
from ...plain_data import JsonObject
from ...pods.cost import CostReport
from ...pods.launching.launch import prepare_launch
from ...pods.launching.run_log import RunLogEntry
from ...pods.providers.protocol import Line, StepCompleted
from ...pods.supervision.journal import SupervisionEvent
from ...pods.supervision.supervisor import Outcome
from ...records.metrics import read_steps
from ...records.names import LOSS, STEP, STEP_TIME
from ..stage import THIS_MACHINE, Beside, Scene, StageResult, measured
from ..stand_in import config_of
from .check import Check

SHOWN_STEPS = 20
"""Steps between two progress messages."""
_LAST_WORDS = 5


class RunFailed(TPUError):
    """A launched run did not finish."""


@dataclass(frozen=True, kw_only=True)
class LaunchedRun:
    """A finished run.

    Attributes:
        outcome: The supervisor's outcome, over all attempts.
        cost: The cost of its pods, by list price.
        records: Its records of steps, without those of evaluations.
        goodput: Its time by cause, over all attempts.
        began: Unix seconds of its first `train()`.
        checkpoint_bytes: Bytes of the newest checkpoint's files.
    """

    name: str
    job: Job
    folder: Path
    outcome: Outcome
    cost: CostReport
    records: tuple[JsonObject, ...]
    goodput: RunGoodput
    began: float
    checkpoint_bytes: int

    @property
    def losses(self) -> dict[int, float | None]:
        """The loss of every step; None where it was not finite."""
        return {record[STEP]: record[LOSS] for record in self.records}

    @property
    def start_s(self) -> float:
        """Seconds from the start of the first process to its first step."""
        first = self.outcome.attempts[0]
        return (first.first_step_at or 0.0) - (first.started_at or 0.0)

    @property
    def ready_s(self) -> float:
        """Seconds from `train()` to the first step."""
        return (self.outcome.attempts[0].first_step_at or 0.0) - self.began

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return statistics.median(record[STEP_TIME] for record in self.records)

    def to_dict(self) -> JsonObject:
        """Return the result as plain data."""
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
    """Launch the stand-in on the emulated cloud, and follow it to its end.

    Args:
        scene: State of the rehearsal.
        name: Name of the run and its folder.
        on_step: Called with every completed step.

    Raises:
        RunFailed: It did not finish.
    """
    folder = scene.folder / name
    document = {**scene.stand_in.job.to_dict()}
    document["train"] = {**document["train"], "run_dir": str(folder.absolute())}
    document["launch"] = {
        **scene.cloud.launch_section(scene.stand_in.job.slice),
        "include": scene.job.launch.include,
    }
    ready = prepare_launch(
        Job.from_dict(document), name=name, state=scene.cloud.store, progress=scene.progress
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
        records=tuple(read_steps(folder)),
        goodput=run.goodput(),
        began=run.attempts()[0].began,
        checkpoint_bytes=_newest_checkpoint_bytes(folder / "checkpoints"),
    )


def _newest_checkpoint_bytes(folder: Path) -> int:
    saved = [path for path in folder.iterdir() if path.name.isdigit()]
    newest = max(saved, key=lambda path: int(path.name))
    return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())


NAME = "undisturbed"


@dataclass(frozen=True)
class CalmRun(StageResult):
    """A run from the first request to the last step.

    Attributes:
        run: The run without interruption.
        checked: The compiler's verdict on the same job, for a TPU.
        first_loss: The expected loss of an untrained model; missing where unknown.
    """

    run: LaunchedRun
    checked: Check | None
    first_loss: Figure
    cloud: str
    _facts = "cloud **run"

    @property
    def sentence(self) -> str:
        """The slice, steps and losses of the run."""
        job, losses = self.run.job, self.run.losses
        first, last = losses[min(losses)] or math.nan, losses[max(losses)] or math.nan
        return (
            f"{job.slice} of {self.cloud}: {len(losses)} steps, loss {first:.4f} → {last:.4f}, "
            f"first step after {seconds_text(self.run.start_s)} (measured)"
        )

    def beside(self) -> Sequence[Beside]:
        """Return tokens, losses, checkpoints and steps, predicted beside measured."""
        run = self.run
        unit = "tokens" if run.job.reads_tokens else "examples"
        pairs = [
            Beside(
                what=f"{unit} in a step",
                predicted=Figure(run.job.tokens_per_step, unit, "model", "the job"),
                predicted_of="any machine",
                measured=measured(run.records[-1]["weight"], unit, "metrics.jsonl of the run"),
                is_comparable=True,
            ),
            Beside(
                what="loss of the first step",
                predicted=self.first_loss,
                predicted_of="any machine",
                measured=_first_loss(run),
                is_comparable=True,
                remark="ln of the vocabulary, as for a uniform guess",
            ),
        ]
        if self.checked is not None:
            pairs += _of_check(self.checked, run)
        return pairs


def _first_loss(run: LaunchedRun) -> Figure:
    first = run.losses[min(run.losses)]
    if first is None:
        return Figure.missing("nats", "it is not finite")
    return measured(first, "nats", "metrics.jsonl of the run")


def _of_check(checked: Check, run: LaunchedRun) -> list[Beside]:
    """Return predictions for the same program beside its measurements on this machine."""
    result = checked.rehearsed
    pairs: list[Beside] = []
    if result.host_memory is not None:
        pairs.append(
            Beside(
                what="checkpoint",
                predicted=result.host_memory.saving,
                predicted_of="any machine",
                measured=measured(run.checkpoint_bytes, "B", "files of the newest checkpoint"),
                is_comparable=True,
                remark="arrays alone, beside files with their metadata",
            )
        )
    if result.prediction is not None:
        slice = result.memory.slice
        source = "timeline of the compiled schedule"
        pairs.append(
            Beside(
                what="step",
                predicted=Figure(result.prediction.step_time_s, "s", "model", source),
                predicted_of=str(slice),
                measured=measured(run.step_s, "s", "median of metrics.jsonl of the run"),
                measured_on=f"{THIS_MACHINE}, {slice.devices} virtual devices",
                is_comparable=False,
                remark="steps of a TPU and of a CPU cannot be compared",
            )
        )
    return pairs


class LaunchStage:
    """Launches on the emulated cloud without interruption."""

    name: ClassVar[str] = "launch"
    question: ClassVar[str] = "Does it launch, and what does it learn without interruption?"

    def run(self, scene: Scene) -> CalmRun:
        """Launch the stand-in, and follow it to its end."""
        run = launch_here(scene, NAME)
        checked = next((finding for finding in scene.findings if isinstance(finding, Check)), None)
        config = config_of(scene.stand_in.job)
        if config is None:
            loss = Figure.missing("nats", "the first loss of a user's own model is not known")
        else:
            loss = Figure(math.log(config.vocab_size), "nats", "model", "ln(vocabulary)")
        return CalmRun(run, checked, loss, f"the emulated '{scene.cloud.provider}'")
