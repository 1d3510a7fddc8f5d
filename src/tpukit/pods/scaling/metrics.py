"""`WorkloadMetrics`: what a running job measures of itself, for whoever decides on its size."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ...errors import TPUValidationError
from ...hardware import Figure
from ...records.metrics import read_metrics
from ...runtime.calls import either_way
from ...shown import Shown
from ...training.result import TrainingResult
from ...training.trainer import TPUTrainer
from ..config import PodConfig

RECENT = 64
"""Steps that count as now."""


@runtime_checkable
class MeasuresItself(Protocol):
    """A job that knows its own metrics: `TpuOptimizer`."""

    def workload_metrics(self) -> "WorkloadMetrics":
        """Return what was measured of the last steps."""
        ...


@dataclass(frozen=True, kw_only=True)
class WorkloadMetrics(Shown):
    """What is known of a job on the pod it has now.

    Attributes:
        config: The pod.
        step_s: A step, in the median of the last ones.
        utilization: Share of a step in which the devices had something to compute.
        goodput: Share of the time on the clock that went into steps that count.
        age_s: How long the pod has served.
        remaining_steps: None where nobody said how many there will be.
    """

    config: PodConfig
    step_s: Figure
    utilization: Figure
    goodput: Figure
    age_s: float
    remaining_steps: int | None = None

    @classmethod
    @either_way
    def from_current_training(
        cls,
        source: "MeasuresItself | TPUTrainer | TrainingResult | str | Path",
        *,
        config: PodConfig | None = None,
        remaining_steps: int | None = None,
        since: float = 0.0,
    ) -> "WorkloadMetrics":
        """Return the metrics of a job.

        Args:
            source: A `TpuOptimizer`, a trainer with a run directory of its own, the result of a
                training, or a run directory, whether its run has ended or not.
            config: The pod it runs on; a trainer's job and an optimizer know it themselves.
            remaining_steps: Where the source does not say.
            since: Of a run directory, only steps after this time count: since its pod is there.

        Raises:
            TPUValidationError: It has measured nothing yet, or the pod is not known.
        """
        if isinstance(source, MeasuresItself):
            return source.workload_metrics()
        if isinstance(source, TPUTrainer):
            config = config or _config_of(source)
            total, folder = source.settings.steps, source.settings.run_dir
            if folder is None:
                raise TPUValidationError(
                    "This trainer has no run directory of its own to read; give it run_dir, or "
                    "pass the run directory itself."
                )
            return _from_records(folder, config, remaining_steps, total, since)
        if isinstance(source, TrainingResult):
            return _from_records(source.run_dir, config, remaining_steps, None, since)
        return _from_records(source, config, remaining_steps, None, since)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "slice": str(self.config.slice),
            "step_s": self.step_s.to_dict(),
            "utilization": self.utilization.to_dict(),
            "goodput": self.goodput.to_dict(),
            "age_s": self.age_s,
            "remaining_steps": self.remaining_steps,
        }


def measure(
    config: PodConfig,
    *,
    step_times_s: Sequence[float],
    stalled_s: Sequence[float],
    wall_s: float,
    steps: int,
    source: str,
    remaining_steps: int | None = None,
) -> WorkloadMetrics:
    """Return the metrics that follow from the times of some steps.

    Args:
        config: The pod.
        step_times_s: Of the last steps.
        stalled_s: How long the devices waited in each of them.
        wall_s: On the clock, from the first step to now.
        steps: That were completed in it.
        source: Where the times come from.
        remaining_steps: None where nobody knows.

    Raises:
        TPUValidationError: There are no steps.
    """
    if not step_times_s:
        raise TPUValidationError(f"{source} holds no step that was timed; take some steps first.")
    step_s = statistics.median(step_times_s)
    busy = 1 - sum(stalled_s) / max(sum(step_times_s), 1e-12)
    useful = min(1.0, steps * step_s * busy / wall_s) if wall_s > 0 else 1.0
    return WorkloadMetrics(
        config=config,
        step_s=Figure(step_s, "s", "measured", f"median of {len(step_times_s)} steps, {source}"),
        utilization=Figure(busy, "", "measured", f"time without waiting for input, {source}"),
        goodput=Figure(useful, "", "measured", f"steps times their median over time, {source}"),
        age_s=wall_s,
        remaining_steps=remaining_steps,
    )


def _config_of(trainer: TPUTrainer) -> PodConfig | None:
    return None if trainer.job.on is None else PodConfig.of(trainer.job.launch, trainer.job.on)


def _from_records(
    folder: str | Path,
    config: PodConfig | None,
    remaining: int | None,
    total: int | None,
    since: float,
) -> WorkloadMetrics:
    if config is None:
        raise TPUValidationError(
            f"{folder} does not say on which pod it runs; pass config=PodConfig(tpu_type=…)."
        )
    timed = (record for record in read_metrics(folder) if record.get("step_time_s"))
    records = [record for record in timed if record["time"] >= since]
    recent = records[-RECENT:]
    last = records[-1]["step"] if records else 0
    if remaining is None and total is not None:
        remaining = max(0, total - last)
    return measure(
        config,
        step_times_s=[record["step_time_s"] for record in recent],
        stalled_s=[record.get("input_stall_s") or 0.0 for record in recent],
        wall_s=time.time() - records[0]["time"] if records else 0.0,
        steps=last - records[0]["step"] if records else 0,
        source=str(Path(folder).name),
        remaining_steps=remaining,
    )
