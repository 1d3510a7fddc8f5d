"""`Choice`: one candidate with its job, time, cost, and the compiler's result."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...hardware import Figure, Slice, model_flop_utilization, peak_of_products
from ...hardware.formats import PeakName
from ...job.job import Job
from ...plain_data import JsonMapping, JsonObject
from ...shown import Facts, Shown
from ..cost.money import SECONDS_PER_DAY, Preemption, run_s

STEP_MODEL = "tpukit's step model"
MEMORY_MODEL = "tpukit's memory model"


@dataclass(frozen=True, kw_only=True)
class Verified(Facts):
    """The compiler's result for a choice.

    Attributes:
        memory_bytes: HBM of one device; None when the compiler refused the program.
        step_time_s: Predicted from the compiled schedule; None with a `reason`.
    """

    fits: bool
    memory_bytes: int | None = None
    step_time_s: float | None = None
    reason: str = ""
    memory_origin = "compiler"
    step_origin = "model of the schedule"
    _facts = "* memory_origin step_origin"


@dataclass(frozen=True, kw_only=True)
class Choice(Shown):
    """A job for one slice, with the time and cost of the whole run.

    Stored values were modelled, compiled or quoted. Every other figure is computed from them, so a
    compiled step changes all figures that depend on it.

    Attributes:
        job: The job, ready to be written as a job file; it names slice, mesh and batch.
        precision: Number format of the matmuls.
        memory: Bytes on one device by purpose, from the memory model.
        modelled_step_s: Seconds of a step, from the step model.
        seconds_by_cause: Parts of `modelled_step_s`.
        steps: Steps of the whole run; the job omits them when they exceed what a run can count.
        model_flops: FLOPs of a step over all devices, as MFU counts them; None where not counted.
        preemption: Rates of preemption and recovery on spot capacity; None on other tiers.
        save_s: Seconds for which saving a checkpoint delays a step.
        write_s: Seconds until a checkpoint is in the store.
        correction: Ratio of compiled to modelled step time on other slices; 1 where this choice
            was compiled, or no choice was.
    """

    job: Job = field(repr=False)
    precision: str
    memory: dict[str, float] = field(repr=False)
    usable_bytes: float
    modelled_step_s: float
    seconds_by_cause: dict[str, float] = field(repr=False)
    steps: int
    model_flops: float | None
    usd_per_chip_hour: Figure
    region: str | None
    preemption: Preemption | None = None
    save_s: float = 0.0
    write_s: float = 0.0
    correction: float = 1.0
    verified: Verified | None = None
    _facts = (
        "slice=slice.name chips=slice.chips mesh batch_size microbatches=job.microbatches remat "
        "precision optimizer=job.train.optimizer moment_dtype=job.train.moment_dtype job "
        "memory_bytes memory_origin=hbm.origin memory_by_purpose_model=memory usable_bytes "
        "host_bytes modelled_step_s correction step_time_s step_origin=step_time.origin "
        "step_source=step_time.source seconds_by_cause_model=seconds_by_cause steps "
        "tokens_per_step model_flops tokens_per_s_per_chip mfu mfu_peak "
        "mfu_most_measured=most_measured extrapolates days chip_hours usd usd_per_chip_hour "
        "region preemption_waste=waste save_s write_s checkpoint_interval_s verified"
    )

    @property
    def slice(self) -> Slice:
        """The slice of the job."""
        return self.job.slice

    @property
    def mesh(self) -> Mapping[str, int]:
        """Devices along each axis, all slices together."""
        return self.job.mesh_sizes

    @property
    def batch_size(self) -> int:
        """Examples in a step over all devices."""
        return self.job.examples

    @property
    def remat(self) -> str:
        """The remat policy of the job."""
        return self.job.remat or ""

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a step over all devices."""
        return self.job.tokens_per_step

    @property
    def hbm(self) -> Figure:
        """HBM of one device, from the compiler where it was compiled."""
        known = self.verified.memory_bytes if self.verified is not None else None
        if known is not None:
            return Figure(known, "B", "compiler", "the compiler's memory report")
        return Figure(self.memory["total"], "B", "model", MEMORY_MODEL)

    @property
    def step_time(self) -> Figure:
        """Seconds of one step, from the compiled schedule where it was compiled."""
        known = self.verified.step_time_s if self.verified is not None else None
        if known:
            return Figure(known, "s", "model", "timeline of the compiled schedule")
        times = f" times {self.correction:.3g}, by compiled schedules of other slices"
        source = STEP_MODEL + (times if self.correction != 1.0 else "")
        return Figure(self.modelled_step_s * self.correction, "s", "model", source)

    @property
    def step_time_s(self) -> float:
        """`step_time` as a number."""
        return self.step_time.require("a choice")

    @property
    def memory_bytes(self) -> float:
        """`hbm` as a number."""
        return self.hbm.require("a choice")

    @property
    def waste(self) -> float:
        """Share of the run time lost to preemption; 0 on tiers other than spot."""
        if self.preemption is None:
            return 0.0
        return float(self.preemption.waste(self.save_s, self.slice.num_slices, **self._save))

    @property
    def checkpoint_interval_s(self) -> float | None:
        """Seconds between two checkpoints on spot capacity; None on other tiers."""
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
        """`run_time` as a number."""
        return self.run_time.require("a choice")

    @property
    def chip_time(self) -> Figure:
        """Chip-hours of the whole run."""
        return self.run_time.scaled(24 * self.slice.chips, unit="chip-h")

    @property
    def chip_hours(self) -> float:
        """`chip_time` as a number."""
        return self.chip_time.require("a choice")

    @property
    def usd(self) -> Figure:
        """Dollars for the whole run; missing where no price is known."""
        return self.chip_time * self.usd_per_chip_hour

    @property
    def tokens_per_s_per_chip(self) -> float:
        """Tokens per second and chip while the job runs."""
        return self.tokens_per_step / self.step_time_s / self.slice.chips

    @property
    def mfu_peak(self) -> PeakName:
        """The peak that MFU is a share of, by the number format of the matmuls."""
        return peak_of_products(self.slice.chip, (self.precision,))

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilization, a share of `mfu_peak`."""
        peak = self.slice.peak_tflops(self.mfu_peak).value
        return model_flop_utilization(self.model_flops, self.step_time_s, peak)

    @property
    def most_measured(self) -> Figure:
        """The highest share of `mfu_peak` that a published step on this chip reached."""
        chip, peak = self.slice.chip, self.mfu_peak
        unknown = Figure.missing("", f"no step in {peak} on {chip.name} was published")
        return chip.measured.get(f"step_mfu_{peak}", unknown)

    @property
    def extrapolates(self) -> bool:
        """Whether the predicted MFU is above that of every published step on this chip."""
        return self.mfu is not None and self.mfu > (self.most_measured.value or 0.0)

    @property
    def host_bytes(self) -> float:
        """Bytes on one host: offloaded activations, and the state while it is checkpointed."""
        state = self.memory["weights"] + self.memory["optimizer"]
        return (self.memory["host"] + state) * self.slice.devices_per_host

    def with_verified(self, verified: Verified) -> "Choice":
        """Return the choice with the compiler's result, which its time and cost then follow."""
        return replace(self, verified=verified)._with_checkpoint_interval()

    def corrected(self, ratio: float) -> "Choice":
        """Return the choice with its modelled step time multiplied by `ratio`."""
        return replace(self, correction=ratio)._with_checkpoint_interval()

    def _with_checkpoint_interval(self) -> "Choice":
        """Return the choice whose job saves as often as `checkpoint_interval_s` says."""
        interval = self.checkpoint_interval_s
        if interval is None or not math.isfinite(interval):
            return self
        every = max(1, round(interval / self.step_time_s))
        return replace(self, job=self.job.replace({"train.checkpoint_every": every}))

    def to_dict(self) -> JsonObject:
        """Return every figure with its origin."""
        preemption = None if self.preemption is None else vars(self.preemption)
        return {**super().to_dict(), "preemption": preemption}

    @classmethod
    def from_dict(cls, data: JsonMapping) -> "Choice":
        """Read what `to_dict` wrote; derived figures are computed again."""
        verified = data["verified"]
        derived = ("memory_origin", "step_origin")
        return cls(
            **{name: data[name] for name in _AS_WRITTEN},
            write_s=data.get("write_s", 0.0),
            job=Job.from_dict(data["job"]),
            memory=data["memory_by_purpose_model"],
            seconds_by_cause=data["seconds_by_cause_model"],
            usd_per_chip_hour=Figure(**data["usd_per_chip_hour"]),
            preemption=None if data["preemption"] is None else Preemption(**data["preemption"]),
            verified=verified
            and Verified(**{key: value for key, value in verified.items() if key not in derived}),
        )


_AS_WRITTEN = (
    *("precision", "usable_bytes", "modelled_step_s", "correction", "steps", "model_flops"),
    *("region", "save_s"),
)
