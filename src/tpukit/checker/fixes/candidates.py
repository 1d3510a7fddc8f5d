"""Changes worth trying, each with the arithmetic that says what it should save."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...compiler.memory import MemoryReport
from ...hardware import list_slices, parse_format
from ...hardware.target import target_chip
from ...job.job import Job
from ...step.optimizer.spec import OptimizerSpec, state_bytes_per_parameter
from .fix import Fix

MOST_PIECES = 16
_NO_REMAT = ("none", "everything")


@dataclass(frozen=True, kw_only=True)
class JobShape:
    """The settings of a job that decide its memory.

    Attributes:
        batch_ways: Devices that share a batch's examples.
        layer_inputs_bytes: What keeping the input of every layer takes on one device.
        parameter_shapes: Of every parameter, layers stacked.
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
        """Read them off a job of a reference transformer."""
        from ...job.step import build_step

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
        """Optimizer state of one parameter, in the mean."""
        width = parse_format(param_dtype or self.param_dtype).itemsize
        return state_bytes_per_parameter(optimizer, self.parameter_shapes, param_bytes=width)


def amount(report: MemoryReport, *purposes: str) -> int:
    """Bytes of several purposes together."""
    return sum(report.purposes.get(name, 0) for name in purposes)


def more_microbatches(shape: JobShape, report: MemoryReport) -> list[Fix]:
    """Cut the step into pieces whose gradients are added up."""
    if shape.pipelined:
        return []
    per_device = shape.batch_size // shape.batch_ways
    moving = amount(report, "activations", "temporaries")
    # Adding up gradients keeps one for every weight all the time.
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
    """Keep less from the forward pass, or keep it on the host."""
    kept = amount(report, "activations")
    inputs = shape.layer_inputs_bytes
    found: list[Fix] = []
    if shape.remat in (*_NO_REMAT, "dots", "minimal"):
        if shape.remat in _NO_REMAT:
            reason = "which products are kept is the compiler's to say"
            cost = "recomputes everything but the products with weights"
            found.append(Fix(changes={"remat": "minimal"}, cost=cost, estimate_reason=reason))
        estimate = report.total_bytes - kept + min(kept, inputs)
        cost = "recomputes the forward pass of each layer"
        found.append(Fix(changes={"remat": "full"}, cost=cost, estimate_bytes=estimate))
    if "offload" not in shape.remat:
        cost = "recomputes each layer, and moves its input to the host and back"
        saved = min(kept, inputs) if shape.remat.startswith("full") else kept
        estimate = report.total_bytes - saved
        changes = {"remat": "offload=decoder_layer_input"}
        found.append(Fix(changes=changes, cost=cost, estimate_bytes=estimate))
    return found


def smaller_optimizer(shape: JobShape, report: MemoryReport) -> list[Fix]:
    """Let the optimizer remember less."""
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
    """Split weights within each slice, where they were to be split over all of them.

    The number of slices often divides no dimension of a model, and then nothing was split at all.
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
            # The first axis that can be is the one that crosses slices.
            changes={"mesh": {"data": joined, "fsdp": inside, **others}},
            cost="each slice holds all weights; gradients are added up between slices",
            estimate_bytes=round(report.total_bytes - now + state),
        )
    ]


def other_mesh(shape: JobShape) -> list[Fix]:
    """Split layers over some of the devices."""
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
    """Fewer examples in a step."""
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
    """Keep weights in half the bits."""
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
    """The next slice of the same generation that the batch can be split over."""
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
