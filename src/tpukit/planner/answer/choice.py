"""One candidate in full: where, how, how long, how much, and what the compiler says of it."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from ...hardware import MFU_FORMAT, Figure, Slice, model_flop_utilization
from ...hardware.formats import spelled_as
from ...job.job import Job
from ...models.transformer.config import OPERANDS
from ...step.optimizer.spec import OptimizerSpec
from ..cost.money import SPOT, Costs, Market
from ..search.candidates import PRECISIONS
from ..search.scoring import Scores
from ..search.subject import Subject

# On slices of few chips the compiler cuts products with gathered weights into pieces and adds these
# up through HBM: llama3.1-8b on v6e-16 takes 4.13 s a step then, and 2.90 s in whole products.
_WHOLE_PRODUCTS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}


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
class Choice:
    """A slice, a mesh and a batch, with what a whole run on them takes.

    Figures have origin `model` unless `verified` gives the compiler's; `usd` says its source.

    Attributes:
        job: The plan, ready to be written as a job file.
        memory: Bytes of one device by purpose.
        waste: Share of the time lost to preemption; 0 unless on spot.
        checkpoint_interval_s: By Young and Daly, on spot; else None.
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
    step_time_s: float
    seconds_by_cause: dict[str, float] = field(repr=False)
    tokens_per_step: int
    mfu: float | None
    days: float
    chip_hours: float
    usd: Figure
    usd_per_chip_hour: Figure
    region: str | None
    waste: float
    checkpoint_interval_s: float | None
    verified: Verified | None = None

    @property
    def memory_bytes(self) -> float:
        """HBM of one device: the compiler's figure where there is one."""
        known = self.verified.memory_bytes if self.verified is not None else None
        return self.memory["total"] if known is None else known

    @property
    def tokens_per_s_per_chip(self) -> float:
        """Throughput."""
        return self.tokens_per_step / self.step_time_s / self.slice.chips

    @property
    def memory_origin(self) -> str:
        """Where `memory_bytes` comes from."""
        known = self.verified is not None and self.verified.memory_bytes is not None
        return "compiler" if known else "model"

    def with_verified(self, verified: Verified) -> "Choice":
        """The same choice with the compiler's result; time and cost follow its schedule."""
        if not verified.step_time_s:
            return replace(self, verified=verified)
        ratio = verified.step_time_s / self.step_time_s
        return replace(
            self,
            verified=verified,
            step_time_s=verified.step_time_s,
            mfu=None if self.mfu is None else self.mfu / ratio,
            days=self.days * ratio,
            chip_hours=self.chip_hours * ratio,
            usd=self.usd.scaled(ratio),
        )

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
            "memory_origin": self.memory_origin,
            "memory_by_purpose_model": self.memory,
            "usable_bytes": self.usable_bytes,
            "step_time_s": self.step_time_s,
            "step_origin": "model",
            "seconds_by_cause_model": self.seconds_by_cause,
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_s_per_chip": self.tokens_per_s_per_chip,
            "mfu": self.mfu,
            "days": self.days,
            "chip_hours": self.chip_hours,
            "usd": self.usd.to_dict(),
            "usd_per_chip_hour": self.usd_per_chip_hour.to_dict(),
            "region": self.region,
            "preemption_waste": self.waste,
            "checkpoint_interval_s": self.checkpoint_interval_s,
            "verified": None if self.verified is None else self.verified.to_dict(),
        }


def optimizer_settings(optimizer: OptimizerSpec) -> dict[str, Any]:
    """Keys of a job's `train:` section that ask for the optimizer; none that are as by default."""
    usual = OptimizerSpec()
    name = {} if optimizer.name == usual.name else {"optimizer": optimizer.name}
    dtype = optimizer.moment_dtype
    return {**name, **({} if dtype == usual.moment_dtype else {"moment_dtype": dtype})}


def choice_at(
    index: int, scores: Scores, costs: Costs, *, subject: Subject, market: Market, tokens: float
) -> Choice:
    """The candidate of that index."""
    candidates = scores.candidates
    mesh = candidates.meshes[candidates.mesh[index]]
    on = mesh.slice
    step_time_s = float(scores.step_time_s[index])
    tokens_per_step = int(scores.tokens_per_step[index])
    quote, region = costs.quotes[on]
    spot = market.tier == SPOT
    interval: float | None = None
    if spot:
        save_s = float(costs.save_s[index])
        interval = float(market.preemption.interval_s(save_s, on.num_slices))
    peak = on.peak_tflops(MFU_FORMAT).value
    precision = PRECISIONS[candidates.precision[index]]
    optimizer = candidates.optimizers[candidates.optimizer[index]]
    remat = candidates.remats[candidates.remat[index]]
    train = {**optimizer_settings(optimizer), "steps": math.ceil(tokens / tokens_per_step)}
    if interval is not None:
        train["checkpoint_every"] = max(1, round(interval / step_time_s))
    changes = dict(subject.changes)
    if precision != subject.precision:
        changes["matmul"] = spelled_as(precision, OPERANDS) or "dtype"
    job = Job(
        model=subject.name,
        model_changes=changes,
        on=str(on),
        mesh=mesh.joined_sizes,
        dcn_mesh=mesh.dcn_mesh,
        batch_size=int(candidates.examples[index]),
        sequence_length=subject.sequence_length,
        microbatches=int(candidates.microbatches[index]),
        remat=remat,
        options=_WHOLE_PRODUCTS if mesh.sizes.get("tensor", 1) == 1 else {},
        train=train,
    )
    memory = {name: float(value[index]) for name, value in scores.memory.to_dict().items()}
    chip_hours = float(costs.chip_hours[index])
    return Choice(
        slice=on,
        mesh=mesh.joined_sizes,
        batch_size=job.examples,
        microbatches=job.microbatches,
        remat=remat,
        precision=precision,
        optimizer=optimizer,
        job=job,
        memory=memory,
        usable_bytes=float(scores.usable_bytes[index]),
        step_time_s=step_time_s,
        seconds_by_cause=scores.step.at(index),
        tokens_per_step=tokens_per_step,
        mfu=model_flop_utilization(subject.flops_per_token * tokens_per_step, step_time_s, peak),
        days=float(costs.days[index]),
        chip_hours=chip_hours,
        usd=quote.scaled(chip_hours, unit="USD"),
        usd_per_chip_hour=quote,
        region=region,
        waste=float(costs.waste[index]),
        checkpoint_interval_s=interval,
    )
