"""`WorkloadMetrics`: measurements of a running job, from which its size is chosen."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ...errors import ConfigError, TPUValidationError
from ...hardware import Figure, PriceBook, Slice, list_slices
from ...records.metrics import read_metrics
from ...records.names import INPUT_STALL, STEP_TIME
from ...runtime.calls import either_way
from ...shown import Shown
from ...training.result import TrainingResult
from ...training.trainer import TPUTrainer
from ..config import PodConfig

"""Slices of one job that are compared; each is a candidate of its own."""


RECENT = 64
"""Number of recent steps to use."""


@runtime_checkable
class MeasuresItself(Protocol):
    """A job that measures itself, such as a `TpuOptimizer`."""

    def workload_metrics(self) -> "WorkloadMetrics":
        """Return measurements of the last steps."""
        ...


@dataclass(frozen=True, kw_only=True)
class WorkloadMetrics(Shown):
    """Measurements of a job on its present pod.

    Attributes:
        config: The pod.
        step_s: Median step time of the recent steps.
        utilization: Share of step time in which devices compute.
        goodput: Share of wall-clock time spent in steps that count.
        age_s: Time since the pod started to serve the job.
        remaining_steps: None if the number is not known.
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
            source: A `TpuOptimizer`, a trainer with a run directory, a training result, or a run
                directory.
            config: The pod; a trainer's job and an optimizer have their own.
            remaining_steps: Needed if the source does not know it.
            since: Use only steps of a run directory after this time, when its pod started.

        Raises:
            TPUValidationError: Nothing was measured yet, or the pod is not known.
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
        """Return plain data."""
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
    """Compute metrics from step times.

    Args:
        config: The pod.
        step_times_s: Durations of the last steps.
        stalled_s: Wait time of the devices in each step.
        wall_s: Wall-clock time from the first step until now.
        steps: Number of steps completed in that time.
        source: Source of the times.
        remaining_steps: None if the number is not known.

    Raises:
        TPUValidationError: There are no steps.
    """
    if not step_times_s:
        raise TPUValidationError(f"{source} has no timed step; take some steps first.")
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
            f"{folder} does not record its pod; pass config=PodConfig(tpu_type=…)."
        )
    timed = (record for record in read_metrics(folder) if record.get(STEP_TIME))
    records = [record for record in timed if record["time"] >= since]
    recent = records[-RECENT:]
    last = records[-1]["step"] if records else 0
    if remaining is None and total is not None:
        remaining = max(0, total - last)
    return measure(
        config,
        step_times_s=[record[STEP_TIME] for record in recent],
        stalled_s=[record.get(INPUT_STALL) or 0.0 for record in recent],
        wall_s=time.time() - records[0]["time"] if records else 0.0,
        steps=last - records[0]["step"] if records else 0,
        source=str(Path(folder).name),
        remaining_steps=remaining,
    )


MOST_SLICES = 256


def cores_of(on: Slice) -> int:
    """Return the number of TensorCores."""
    return on.chips * on.chip.cores_per_chip


def legal_slices(on: Slice, *, min_cores: int, max_cores: int) -> tuple[Slice, ...]:
    """Return the sizes that a slice may change to, smallest first, or multiples of a slice.

    Raises:
        ConfigError: No size has a number of cores within the bounds.
    """
    if on.num_slices == 1:
        possible = list(list_slices(on.chip.name))
    else:
        of_one = cores_of(on) // on.num_slices
        most = max(1, min(max_cores // of_one, MOST_SLICES))
        possible = [Slice(on.chip, on.topology, number) for number in range(1, most + 1)]
    sizes = {cores_of(size): size for size in possible}
    sizes[cores_of(on)] = on  # keep its own shape
    legal = [sizes[cores] for cores in sorted(sizes) if min_cores <= cores <= max_cores]
    if not legal:
        near = ", ".join(str(cores) for cores in sorted(sizes)[:12])
        raise ConfigError(
            f"No {on.chip.name} slice has {min_cores} to {max_cores} cores; sizes are {near} …; "
            "set with_min_cores and with_max_cores around one of them."
        )
    return tuple(legal)


@dataclass(frozen=True)
class Size:
    """A slice, and the job's predicted step on it.

    Compute time is divided by the cores; wait time stays the same.

    Attributes:
        step_s: Predicted step time; measured for the present slice.
        utilization: Predicted or measured share of step time in which devices compute.
        usd_per_step: From the price catalog; missing if there is no price.
    """

    slice: Slice
    step_s: Figure
    utilization: Figure
    usd_per_step: Figure

    @property
    def cores(self) -> int:
        """Number of TensorCores."""
        return cores_of(self.slice)

    @property
    def core_seconds(self) -> float:
        """Core-seconds per step, the cost if there is no price."""
        return self.cores * (self.step_s.value or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "slice": str(self.slice),
            "cores": self.cores,
            "step_s": self.step_s.to_dict(),
            "utilization": self.utilization.to_dict(),
            "usd_per_step": self.usd_per_step.to_dict(),
        }


def predict_size(metrics: WorkloadMetrics, on: Slice, prices: PriceBook) -> Size:
    """Predict the job's step on another slice of the same generation."""
    now = metrics.config.slice
    step_s = metrics.step_s.require("scaling")
    busy_s = step_s * metrics.utilization.require("scaling")
    busy_there = busy_s * cores_of(now) / cores_of(on)
    there_s = busy_there + (step_s - busy_s)
    model = Figure(1.0, "", "model", "compute time divided by cores, wait time unchanged")
    inputs = (metrics.step_s, metrics.utilization)
    inputs = inputs if on == now else (*inputs, model)
    # Any region works, because regions scale the prices of all sizes equally.
    zones = metrics.config.zones
    region = zones[0].rpartition("-")[0] if zones else None
    priced = {rate.region for rate in prices.find(on.chip.name)}
    price = prices.cost_per_hour(
        on, region=region if region in priced else None, tier=_tier(metrics)
    )
    step = Figure.derived(there_s, "s", inputs=inputs)
    value = None if price.value is None else price.value * there_s / 3600
    return Size(
        slice=on,
        step_s=step,
        utilization=Figure.derived(busy_there / there_s if there_s else 1.0, "", inputs=inputs),
        usd_per_step=Figure.derived(value, "USD/step", inputs=(price, step)),
    )


def _tier(metrics: WorkloadMetrics) -> str:
    return "spot" if metrics.config.tier.value == "spot" else "on_demand"
