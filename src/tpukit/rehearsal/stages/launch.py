"""The launch: what a cloud is asked for, and a run that nobody disturbs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...hardware.figure import Figure, seconds_text
from ..beside import THIS_MACHINE, Beside, measured
from ..launched import LaunchedRun, launch_here
from ..scene import Scene
from ..stand_in import config_of
from .check import Check

NAME = "undisturbed"


@dataclass(frozen=True)
class CalmRun:
    """A run from the first request to the last step.

    Attributes:
        run: Undisturbed.
        checked: What the compiler said of the very same job, for a TPU.
        first_loss: What a model that knows nothing should lose; missing where that is not known.
    """

    run: LaunchedRun
    checked: Check | None
    first_loss: Figure
    cloud: str

    is_good = True

    @property
    def sentence(self) -> str:
        """What ran where."""
        job, losses = self.run.job, self.run.losses
        first, last = losses[min(losses)] or math.nan, losses[max(losses)] or math.nan
        return (
            f"{job.slice} of {self.cloud}: {len(losses)} steps, loss {first:.4f} → {last:.4f}, "
            f"first step after {seconds_text(self.run.start_s)} (measured)"
        )

    def beside(self) -> Sequence[Beside]:
        """Tokens, losses, checkpoints, and steps of two machines."""
        run = self.run
        unit = "tokens" if run.job.reads_tokens else "examples"
        found = [
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
            found += _of_check(self.checked, run)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"cloud": self.cloud, **self.run.to_dict()}


def _first_loss(run: LaunchedRun) -> Figure:
    first = run.losses[min(run.losses)]
    if first is None:
        return Figure.missing("nats", "it is not finite")
    return measured(first, "nats", "metrics.jsonl of the run")


def _of_check(checked: Check, run: LaunchedRun) -> list[Beside]:
    """Hold what was predicted of the very same program beside what it did here."""
    result = checked.rehearsed
    found: list[Beside] = []
    if result.host_memory is not None:
        found.append(
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
        found.append(
            Beside(
                what="step",
                predicted=Figure(result.prediction.step_time_s, "s", "model", source),
                predicted_of=str(slice),
                measured=measured(run.step_s, "s", "median of metrics.jsonl of the run"),
                measured_on=f"{THIS_MACHINE}, {slice.devices} virtual devices",
                is_comparable=False,
                remark="a TPU's step and a CPU's step: neither says anything of the other",
            )
        )
    return found


class LaunchStage:
    """Launches on the emulated cloud and disturbs nobody."""

    name: ClassVar[str] = "launch"
    question: ClassVar[str] = "Does it launch, and what does it learn when nobody disturbs it?"

    def run(self, scene: Scene) -> CalmRun:
        """Launch, and follow it to its end."""
        found = launch_here(scene, NAME)
        checked = next((one for one in scene.findings if isinstance(one, Check)), None)
        config = config_of(scene.stand_in.job)
        if config is None:
            loss = Figure.missing("nats", "what a model of one's own loses first is not known")
        else:
            loss = Figure(math.log(config.vocab_size), "nats", "model", "ln(vocabulary)")
        return CalmRun(found, checked, loss, f"the emulated '{scene.cloud.provider}'")
