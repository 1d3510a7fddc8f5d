"""Propose changes that reduce a job's memory, with estimates, and compile the first of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..compiler.memory import MemoryReport
from ..errors import TPUError
from ..hardware import list_slices, parse_format
from ..hardware.target import target_chip
from ..job.job import Job
from ..models.remat.policy import DOTS, FULL, MINIMAL, RematPolicy
from ..plain_data import JsonObject
from ..runtime.progress import Progress, silent
from ..step.optimizer_spec import OptimizerSpec, state_bytes_per_parameter
from .compiling import compile_jobs
from .fix import Fix, FixList, rank, worth_showing

MOST_PIECES = 16


@dataclass(frozen=True, kw_only=True)
class JobShape:
    """The settings of a job that decide its memory.

    Attributes:
        batch_ways: Devices that a batch is split over.
        layer_inputs_bytes: Bytes per device to keep the input of every layer.
        parameter_shapes: Shape of every parameter, with layers stacked.
    """

    batch_size: int
    batch_ways: int
    microbatches: int
    remat: str
    optimizer: OptimizerSpec
    param_dtype: str
    mesh: Mapping[str, int]
    heads: int
    layer_inputs_bytes: int
    parameter_shapes: tuple[tuple[int, ...], ...]
    pipelined: bool

    @classmethod
    def of(cls, job: Job) -> "JobShape":
        """Return the shape of a reference transformer's job."""
        from ..job.step import build_step

        with target_chip(job.slice.chip.name):
            work = build_step(job, values=False).work
        config = work.config
        assert config is not None  # fixes are for reference transformers
        tokens = job.tokens_per_step // job.batch_ways // job.microbatches
        width = parse_format(config.dtype).itemsize
        return cls(
            batch_size=job.examples,
            batch_ways=job.batch_ways,
            microbatches=job.microbatches,
            remat=str(work.remat),
            optimizer=job.train.optimizer_spec(),
            param_dtype=config.param_dtype,
            mesh=job.mesh_sizes,
            heads=config.n_heads,
            layer_inputs_bytes=config.n_layers * tokens * config.d_model * width,
            parameter_shapes=tuple(config.parameter_shapes().values()),
            pipelined="pipeline" in work.strategy,
        )

    def state_bytes(self, optimizer: OptimizerSpec, *, param_dtype: str = "") -> float:
        """Return the mean optimizer state per parameter, in bytes."""
        width = parse_format(param_dtype or self.param_dtype).itemsize
        return state_bytes_per_parameter(optimizer, self.parameter_shapes, param_bytes=width)


def amount(report: MemoryReport, *purposes: str) -> int:
    """Return the bytes of several purposes together."""
    return sum(report.purposes.get(name, 0) for name in purposes)


def more_microbatches(shape: JobShape, report: MemoryReport) -> list[Fix]:
    """Propose to split the batch into more microbatches."""
    if shape.pipelined:
        return []
    per_device = shape.batch_size // shape.batch_ways
    moving = amount(report, "activations", "temporaries")
    # Summing gradients keeps one for every weight during the whole step.
    sums = max(0, amount(report, "parameters") - amount(report, "gradients"))
    found: list[Fix] = []
    for pieces in range(2, MOST_PIECES + 1):
        count = shape.microbatches * pieces
        if per_device % count == 0:
            saved = moving - moving // pieces
            estimate = report.total_bytes - saved + (sums if shape.microbatches == 1 else 0)
            cost = "the same step, in smaller pieces; weights are gathered for each piece"
            found.append(Fix(changes={"microbatches": count}, cost=cost, estimate_bytes=estimate))
    return found


def other_remat(shape: JobShape, report: MemoryReport) -> list[Fix]:
    """Propose to keep fewer activations, or to keep them on the host."""
    kept = amount(report, "activations")
    inputs = shape.layer_inputs_bytes
    found: list[Fix] = []
    policy = RematPolicy.parse(shape.remat)
    if policy.keeps_everything or shape.remat in (DOTS, MINIMAL):
        if policy.keeps_everything:
            reason = "which products are kept is the compiler's to say"
            cost = "recomputes everything but the products with weights"
            found.append(Fix(changes={"remat": MINIMAL}, cost=cost, estimate_reason=reason))
        estimate = report.total_bytes - kept + min(kept, inputs)
        cost = "recomputes the forward pass of each layer"
        found.append(Fix(changes={"remat": FULL}, cost=cost, estimate_bytes=estimate))
    if "offload" not in shape.remat:
        cost = "recomputes each layer, and moves its input to the host and back"
        saved = min(kept, inputs) if policy.keeps_inputs_only else kept
        estimate = report.total_bytes - saved
        changes = {"remat": "offload=decoder_layer_input"}
        found.append(Fix(changes=changes, cost=cost, estimate_bytes=estimate))
    return found


def smaller_optimizer(shape: JobShape, report: MemoryReport) -> list[Fix]:
    """Propose an optimizer with less state."""
    now = shape.optimizer
    state = amount(report, "optimizer state")
    if now.name != "adamw" or not state:
        return []

    def fix(changes: Mapping[str, str], then: OptimizerSpec, cost: str) -> Fix:
        ratio = shape.state_bytes(then) / shape.state_bytes(now)
        estimate = report.total_bytes - state + round(state * ratio)
        return Fix(changes=changes, cost=cost, estimate_bytes=estimate)

    found: list[Fix] = []
    if now.moment_dtype == "float32":
        narrow = OptimizerSpec(moment_dtype="bfloat16")
        cost = "the first moment in half the bits"
        found.append(fix({"train.moment_dtype": "bfloat16"}, narrow, cost))
    changes = {"train.optimizer": "adafactor", "train.moment_dtype": "float32"}
    cost = "another optimizer: factored second moments, no first"
    return [*found, fix(changes, OptimizerSpec(name="adafactor"), cost)]


def data_over_slices(shape: JobShape, report: MemoryReport) -> list[Fix]:
    """Propose to shard weights within each slice instead of over all slices.

    The number of slices often divides no dimension of a model, and then nothing is sharded.
    """
    within = report.slice.devices // report.slice.num_slices
    if report.slice.num_slices == 1 or shape.mesh.get("fsdp", 1) <= within:
        return []
    if shape.mesh["fsdp"] % report.slice.num_slices:
        return []
    inside = shape.mesh["fsdp"] // report.slice.num_slices
    count = sum(math.prod(sizes) for sizes in shape.parameter_shapes)
    width = parse_format(shape.param_dtype).itemsize
    ways = inside * math.prod(shape.mesh.get(axis, 1) for axis in ("tensor", "stage"))
    state = count * (2 * width + shape.state_bytes(shape.optimizer)) / ways
    now = amount(report, "parameters", "optimizer state", "gradients")
    joined = shape.mesh.get("data", 1) * report.slice.num_slices
    others = {axis: size for axis, size in shape.mesh.items() if axis not in ("data", "fsdp")}
    return [
        Fix(
            # The first axis that the number of slices divides is the one across slices.
            changes={"mesh": {"data": joined, "fsdp": inside, **others}},
            cost="each slice holds all weights; gradients are added up between slices",
            estimate_bytes=round(report.total_bytes - now + state),
        )
    ]


def other_mesh(shape: JobShape) -> list[Fix]:
    """Propose tensor parallelism over some of the devices."""
    if set(shape.mesh) != {"fsdp"}:
        return []
    devices = shape.mesh["fsdp"]
    reason = "what the compiler keeps of gathered weights and split activations is its to say"
    cost = "an exchange of activations in each layer"
    return [
        Fix(
            changes={
                "mesh": {"fsdp": devices // ways, "tensor": ways},
                "strategy": "fsdp+megatron",
            },
            cost=cost,
            estimate_reason=reason,
        )
        for ways in (2, 4)
        if devices % ways == 0 and devices > ways and shape.heads % ways == 0
    ]


def smaller_batch(shape: JobShape, report: MemoryReport) -> list[Fix]:
    """Propose fewer examples per step."""
    step = shape.batch_ways * shape.microbatches
    moving = amount(report, "activations", "temporaries")
    found: list[Fix] = []
    pieces = shape.batch_size // step
    for smaller in sorted({pieces * 3 // 4, pieces // 2, pieces // 4, 1}, reverse=True):
        if 0 < smaller < pieces:
            estimate = report.total_bytes - moving + moving * smaller // pieces
            cost = "fewer tokens in a step, so more steps"
            changes = {"batch_size": smaller * step}
            found.append(Fix(changes=changes, cost=cost, estimate_bytes=estimate))
    return found


def smaller_weights(shape: JobShape, report: MemoryReport) -> list[Fix]:
    """Propose weights in half the bits."""
    if shape.param_dtype != "float32":
        return []
    wide, narrow = (
        shape.state_bytes(shape.optimizer, param_dtype=dtype) for dtype in ("float32", "bfloat16")
    )
    state = amount(report, "optimizer state")
    saved = amount(report, "parameters") // 2 + round(state * (1 - narrow / wide))
    return [
        Fix(
            changes={"train.param_dtype": "bfloat16"},
            cost="weights and second moments in half the bits: small updates are lost",
            estimate_bytes=report.total_bytes - saved,
        )
    ]


def larger_slice(shape: JobShape, report: MemoryReport) -> list[Fix]:
    """Propose the next larger slice of the same generation that the batch can be split over."""
    if set(shape.mesh) != {"fsdp"} or report.slice.num_slices > 1:
        return []
    halving = ("parameters", "optimizer state", "gradients", "activations", "temporaries")
    for larger in list_slices(report.slice.chip.name):
        times = larger.devices // report.slice.devices
        if times > 1 and shape.batch_size % (larger.devices * shape.microbatches) == 0:
            split = amount(report, *halving)
            return [
                Fix(
                    changes={"on": str(larger), "mesh": {"fsdp": larger.devices}},
                    cost=f"{times} times the chips",
                    estimate_bytes=report.total_bytes - split + split // times,
                )
            ]
    return []


FIXES_PROVED = 6


def propose_fixes(shape: JobShape, report: MemoryReport) -> FixList:
    """Return every change worth trying, those that should fit first, by effort."""
    found = [
        *more_microbatches(shape, report),
        *other_remat(shape, report),
        *smaller_optimizer(shape, report),
        *data_over_slices(shape, report),
        *other_mesh(shape),
        *smaller_batch(shape, report),
        *smaller_weights(shape, report),
        *larger_slice(shape, report),
    ]
    usable = report.usable_bytes
    fixes = [replace(fix, usable_bytes=usable) for fix in found]
    if not any(fix.promising for fix in fixes) and (both := _together(fixes, report)):
        fixes.append(replace(both, usable_bytes=usable))
    return rank(fixes)


def _together(fixes: list[Fix], report: MemoryReport) -> Fix | None:
    """Return one fix that combines the largest saving of each kind."""
    best: dict[str, Fix] = {}
    for fix in fixes:
        key = next(iter(fix.changes))
        if key in ("batch_size", "on") or fix.estimate_bytes is None:
            continue
        if key not in best or fix.estimate_bytes < (best[key].estimate_bytes or 0):
            best[key] = fix
    if len(best) < 2:
        return None
    saved = sum(report.total_bytes - (fix.estimate_bytes or 0) for fix in best.values())
    # Savings of different kinds overlap, so the estimate stays above what none of them affects.
    touched = amount(report, "activations", "temporaries", "optimizer state")
    floor = report.total_bytes - touched - amount(report, "parameters") // 2
    changes: JsonObject = {}
    for fix in best.values():
        changes.update(fix.changes)
    return Fix(
        changes=changes,
        cost="all of these together",
        estimate_bytes=max(floor, report.total_bytes - saved),
    )


def find_fixes(
    job: Job,
    memory: MemoryReport,
    *,
    prove: bool,
    timeout_s: float | None = None,
    use_cache: bool = True,
    progress: Progress = silent,
) -> FixList:
    """Propose changes that reduce a job's memory; with `prove`, compile the first of them."""
    proposed = worth_showing(propose_fixes(JobShape.of(job), memory))
    if not prove:
        return proposed
    tried = list(proposed.fixes[:FIXES_PROVED])
    progress(f"verifying {len(tried)} fixes, each by a compile")
    jobs: dict[int, Job] = {}
    for number, fix in enumerate(tried):
        try:
            jobs[number] = job.replace(fix.changes)
        except TPUError as error:
            tried[number] = fix.tried(error)
    answers = compile_jobs(
        list(jobs.values()),
        until="memory",
        timeout_s=timeout_s or job.compile.compilation_timeout_seconds,
        use_cache=use_cache,
        progress=progress,
    )
    for number, answer in zip(jobs, answers, strict=True):
        tried[number] = tried[number].tried(answer)
    return worth_showing(rank([*tried, *proposed.fixes[FIXES_PROVED:]]))
