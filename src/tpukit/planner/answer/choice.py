"""One candidate in full: where, how, how long, how much, and what the compiler says of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...hardware import Figure, Slice, model_flop_utilization, peak_of_products
from ...hardware.formats import PeakName
from ...job.job import Job
from ...shown import Shown
from ...step.optimizer.spec import OptimizerSpec
from ..cost.money import run_s
from ..cost.spot import SECONDS_PER_DAY, Preemption

STEP_MODEL = "tpukit's step model"
MEMORY_MODEL = "tpukit's memory model"


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What the compiler says of a choice.

    Attributes:
        memory_bytes: Of one device, by the compiler; None when it refused the program.
        step_time_s: By the timeline of the compiled schedule; None with a `reason`.
    """

    fits: bool
    memory_bytes: int | None = None
    step_time_s: float | None = None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "memory_origin": "compiler", "step_origin": "model of the schedule"}


@dataclass(frozen=True, kw_only=True)
class Choice(Shown):
    """A slice, a mesh and a batch, with what a whole run on them takes.

    What is stored was modelled, compiled or quoted; everything else follows from it, so that a
    compiled step changes every figure that depends on it.

    Attributes:
        job: The plan, ready to be written as a job file.
        memory: Bytes of one device by purpose, by the model.
        modelled_step_s: By the step model.
        steps: Of the whole run; its job leaves them out where they are more than a run can count.
        correction: What compiled steps of other slices took over the model's; 1 where this one
            was compiled, or nothing was.
        seconds_by_cause: Parts of `modelled_step_s`.
        model_flops: Of a step over all devices, as MFU counts them; None where nobody counted.
        preemption: What spot capacity does to the run; None on other tiers.
        save_s: For which a checkpoint holds a step up.
        write_s: Until it is in the store.
    """

    slice: Slice
    mesh: dict[str, int]
    batch_size: int
    microbatches: int
    remat: str
    precision: str
    optimizer: OptimizerSpec
    job: Job = field(repr=False)
    memory: dict[str, float] = field(repr=False)
    usable_bytes: float
    modelled_step_s: float
    seconds_by_cause: dict[str, float] = field(repr=False)
    steps: int
    tokens_per_step: int
    model_flops: float | None
    usd_per_chip_hour: Figure
    region: str | None
    preemption: Preemption | None = None
    save_s: float = 0.0
    write_s: float = 0.0
    correction: float = 1.0
    verified: Verified | None = None

    @property
    def hbm(self) -> Figure:
        """Memory of one device: the compiler's figure where there is one."""
        known = self.verified.memory_bytes if self.verified is not None else None
        if known is not None:
            return Figure(known, "B", "compiler", "the compiler's memory report")
        return Figure(self.memory["total"], "B", "model", MEMORY_MODEL)

    @property
    def step_time(self) -> Figure:
        """Seconds of one step, by the compiled schedule where there is one."""
        known = self.verified.step_time_s if self.verified is not None else None
        if known:
            return Figure(known, "s", "model", "timeline of the compiled schedule")
        times = f" times {self.correction:.3g}, by compiled schedules of other slices"
        source = STEP_MODEL + (times if self.correction != 1.0 else "")
        return Figure(self.modelled_step_s * self.correction, "s", "model", source)

    @property
    def step_time_s(self) -> float:
        """The same as a number."""
        return self.step_time.require("a choice")

    @property
    def memory_bytes(self) -> float:
        """HBM of one device as a number."""
        return self.hbm.require("a choice")

    @property
    def waste(self) -> float:
        """Share of the time lost to preemption; 0 unless on spot."""
        if self.preemption is None:
            return 0.0
        return float(self.preemption.waste(self.save_s, self.slice.num_slices, **self._save))

    @property
    def checkpoint_interval_s(self) -> float | None:
        """The interval between two saves on spot; else None."""
        if self.preemption is None or not self.preemption.per_slice_day:
            return None
        return float(self.preemption.interval_s(self.save_s, self.slice.num_slices, **self._save))

    @property
    def _save(self) -> dict[str, float]:
        return {"write_s": self.write_s, "step_s": self.step_time_s}

    @property
    def run_time(self) -> Figure:
        """Days of the whole run."""
        times = float(run_s(self.steps, 1.0, self.waste)) / SECONDS_PER_DAY
        return self.step_time.scaled(times, unit="days")

    @property
    def days(self) -> float:
        """The same as a number."""
        return self.run_time.require("a choice")

    @property
    def chip_time(self) -> Figure:
        """What is paid for, in chip-hours."""
        return self.run_time.scaled(24 * self.slice.chips, unit="chip-h")

    @property
    def chip_hours(self) -> float:
        """The same as a number."""
        return self.chip_time.require("a choice")

    @property
    def usd(self) -> Figure:
        """The whole run at `usd_per_chip_hour`; missing where no price is known."""
        return self.chip_time * self.usd_per_chip_hour

    @property
    def tokens_per_s_per_chip(self) -> float:
        """Throughput while it runs."""
        return self.tokens_per_step / self.step_time_s / self.slice.chips

    @property
    def mfu_peak(self) -> PeakName:
        """The peak that MFU is a share of, by the format of the products."""
        return peak_of_products(self.slice.chip, (self.precision,))

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilization, a share of `mfu_peak`."""
        peak = self.slice.peak_tflops(self.mfu_peak).value
        return model_flop_utilization(self.model_flops, self.step_time_s, peak)

    @property
    def most_measured(self) -> Figure:
        """The best share of that peak that a published step on such chips reached."""
        chip, peak = self.slice.chip, self.mfu_peak
        unknown = Figure.missing("", f"nobody published a step in {peak} on {chip.name}")
        return chip.measured.get(f"step_mfu_{peak}", unknown)

    @property
    def extrapolates(self) -> bool:
        """Whether it is to be faster than any published step on such chips."""
        return self.mfu is not None and self.mfu > (self.most_measured.value or 0.0)

    @property
    def host_bytes(self) -> float:
        """Memory of one host that waits for the backward pass or for a checkpoint to be written."""
        state = self.memory["weights"] + self.memory["optimizer"]
        return (self.memory["host"] + state) * self.slice.devices_per_host

    def with_verified(self, verified: Verified) -> "Choice":
        """The same choice with the compiler's result; time and cost follow its schedule."""
        return replace(self, verified=verified)._saving_at_best()

    def corrected(self, ratio: float) -> "Choice":
        """The same choice with steps as much slower as others were when compiled."""
        return replace(self, correction=ratio)._saving_at_best()

    def _saving_at_best(self) -> "Choice":
        """With the steps between checkpoints that the interval comes to."""
        interval = self.checkpoint_interval_s
        if interval is None or not math.isfinite(interval):
            return self
        every = max(1, round(interval / self.step_time_s))
        return replace(self, job=self.job.replace({"train.checkpoint_every": every}))

    def to_dict(self) -> dict[str, Any]:
        """Every figure, with where it comes from."""
        return {
            "slice": str(self.slice),
            "chips": self.slice.chips,
            "mesh": self.mesh,
            "batch_size": self.batch_size,
            "microbatches": self.microbatches,
            "remat": self.remat,
            "precision": self.precision,
            "optimizer": self.optimizer.name,
            "moment_dtype": self.optimizer.moment_dtype,
            "job": self.job.to_dict(),
            "memory_bytes": self.memory_bytes,
            "memory_origin": self.hbm.origin,
            "memory_by_purpose_model": self.memory,
            "usable_bytes": self.usable_bytes,
            "host_bytes": self.host_bytes,
            "modelled_step_s": self.modelled_step_s,
            "correction": self.correction,
            "step_time_s": self.step_time_s,
            "step_origin": self.step_time.origin,
            "step_source": self.step_time.source,
            "seconds_by_cause_model": self.seconds_by_cause,
            "steps": self.steps,
            "tokens_per_step": self.tokens_per_step,
            "model_flops": self.model_flops,
            "tokens_per_s_per_chip": self.tokens_per_s_per_chip,
            "mfu": self.mfu,
            "mfu_peak": self.mfu_peak,
            "mfu_most_measured": self.most_measured.to_dict(),
            "extrapolates": self.extrapolates,
            "days": self.days,
            "chip_hours": self.chip_hours,
            "usd": self.usd.to_dict(),
            "usd_per_chip_hour": self.usd_per_chip_hour.to_dict(),
            "region": self.region,
            "preemption": None if self.preemption is None else vars(self.preemption),
            "preemption_waste": self.waste,
            "save_s": self.save_s,
            "write_s": self.write_s,
            "checkpoint_interval_s": self.checkpoint_interval_s,
            "verified": None if self.verified is None else self.verified.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Choice":
        """Read what `to_dict` wrote; what follows from the rest is reckoned anew."""
        known = data["verified"]
        unsaid = ("memory_origin", "step_origin")
        return cls(
            **{name: data[name] for name in _AS_WRITTEN},
            write_s=data.get("write_s", 0.0),
            slice=Slice.parse(data["slice"]),
            optimizer=OptimizerSpec(name=data["optimizer"], moment_dtype=data["moment_dtype"]),
            job=Job.from_dict(data["job"]),
            memory=data["memory_by_purpose_model"],
            seconds_by_cause=data["seconds_by_cause_model"],
            usd_per_chip_hour=Figure(**data["usd_per_chip_hour"]),
            preemption=None if data["preemption"] is None else Preemption(**data["preemption"]),
            verified=known
            and Verified(**{key: value for key, value in known.items() if key not in unsaid}),
        )


_AS_WRITTEN = (
    *("mesh", "batch_size", "microbatches", "remat", "precision", "usable_bytes"),
    *("modelled_step_s", "correction", "steps", "tokens_per_step", "model_flops"),
    *("region", "save_s"),
)
