"""What could make a training step fit: candidates with an estimate, each checked by a compile.

An estimate is simple arithmetic on the memory report (origin `model`): what a change acts on is
scaled, everything else stays. Only a compile (origin `compiler`) says whether it is so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..hardware.figure import format_quantity
from .memory import MemoryReport

# From the cheapest to live with to the dearest.
_EFFORT = ("microbatches", "remat", "optimizer", "mesh", "batch_size", "model")
_NO_REMAT = ("none", "everything")
THIN_SHARE = 0.05
MOST_PIECES = 16


@dataclass(frozen=True, kw_only=True)
class JobShape:
    """The settings of a job that decide its memory.

    Attributes:
        model: Name of its preset; `model_changes` are the fields changed in it.
        batch_ways: Devices that share a batch's examples.
        layer_inputs_bytes: What keeping the input of every layer takes on one device.
    """

    model: str
    model_changes: Mapping[str, Any]
    batch_size: int
    batch_ways: int
    microbatches: int
    remat: str
    optimizer: str
    param_dtype: str
    mesh: Mapping[str, int]
    heads: int
    layer_inputs_bytes: int
    pipelined: bool


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One change to a job.

    Attributes:
        changes: New values by key of the job.
        cost: What it costs to live with.
        estimate_bytes: Total HBM by arithmetic, or None with `estimate_reason`.
        verified_bytes: Total HBM by a compile; None when none was made.
        fits: What the compile said.
        failure: Why the compile gave no answer.
    """

    changes: Mapping[str, Any]
    cost: str
    estimate_bytes: int | None = None
    estimate_reason: str = ""
    usable_bytes: int | None = None
    verified_bytes: int | None = None
    fits: bool | None = None
    failure: str = ""

    @property
    def promising(self) -> bool:
        """Whether the compile, or else the estimate, says that it fits."""
        if self.fits is not None:
            return self.fits
        if self.failure or self.estimate_bytes is None or self.usable_bytes is None:
            return False
        return self.estimate_bytes <= self.usable_bytes

    @property
    def text(self) -> str:
        """The change as a line of YAML."""
        return ", ".join(f"{key}: {_yaml(value)}" for key, value in self.changes.items())

    def verified(self, report: MemoryReport) -> "Fix":
        """The same with what a compile said."""
        return replace(self, verified_bytes=report.total_bytes, fits=report.fits)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "changes": dict(self.changes),
            "cost": self.cost,
            "estimate": {
                "value": self.estimate_bytes,
                "origin": "model",
                "reason": self.estimate_reason,
            },
            "verified": {"value": self.verified_bytes, "origin": "compiler"},
            "fits": self.fits,
            "failure": self.failure,
        }


@dataclass(frozen=True)
class FixList:
    """Fixes, the best first."""

    fixes: tuple[Fix, ...] = field(default_factory=tuple[Fix, ...])

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"fixes": [fix.to_dict() for fix in self.fixes]}

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table("", "change", "estimate (model)", "compiled (compiler)", "what it costs")
        table.box, table.pad_edge = None, False
        for fix in self.fixes:
            mark, style = {True: ("✓", "green"), False: ("✗", "red"), None: ("?", "dim")}[fix.fits]
            row = (fix.text, _size(fix.estimate_bytes), _size(fix.verified_bytes), fix.cost)
            table.add_row(Text(mark, style=style), *map(Text, row))
        for fix in self.fixes:
            if fix.failure:
                table.add_row("", Text(fix.text), "", Text("failed", style="red"), fix.failure)
        return table


def _size(amount: int | None) -> str:
    return "–" if amount is None else format_quantity(amount, "B")


def is_thin(report: MemoryReport) -> bool:
    """Whether it does not fit, or fits so closely that a small change may break it."""
    left = report.headroom_bytes
    return not report.fits or (left is not None and left < THIN_SHARE * (report.usable_bytes or 0))


def propose_fixes(shape: JobShape, report: MemoryReport) -> FixList:
    """Every change worth trying: those that should fit first, the cheapest of them first."""
    found = [
        *_more_microbatches(shape, report),
        *_other_remat(shape, report),
        *_smaller_optimizer(shape, report),
        *_other_mesh(shape),
        *_smaller_batch(shape, report),
        *_smaller_weights(shape, report),
    ]
    usable = report.usable_bytes
    fixes = [replace(fix, usable_bytes=usable) for fix in found]
    if not any(fix.promising for fix in fixes) and (both := _together(fixes, report)):
        fixes.append(replace(both, usable_bytes=usable))
    return rank(fixes)


def rank(fixes: list[Fix]) -> FixList:
    """Those that fit first, by effort; then the unknown; then by how near they come."""

    def order(fix: Fix) -> tuple[int, int, int]:
        amount = fix.verified_bytes if fix.verified_bytes is not None else fix.estimate_bytes
        group = 0 if fix.promising else 1 if amount is None and not fix.failure else 2
        effort = max(_EFFORT.index(key) for key in fix.changes if key in _EFFORT)
        return group, effort if group < 2 else 0, amount or 0

    return FixList(tuple(sorted(fixes, key=order)))


def _amount(report: MemoryReport, *purposes: str) -> int:
    return sum(report.purposes.get(name, 0) for name in purposes)


def _more_microbatches(shape: JobShape, report: MemoryReport) -> list[Fix]:
    if shape.pipelined:
        return []
    per_device = shape.batch_size // shape.batch_ways
    moving = _amount(report, "activations", "temporaries")
    # Adding up gradients keeps one for every weight all the time.
    sums = max(0, _amount(report, "parameters") - _amount(report, "gradients"))
    found: list[Fix] = []
    for pieces in range(2, MOST_PIECES + 1):
        count = shape.microbatches * pieces
        if per_device % count == 0:
            saved = moving - moving // pieces
            estimate = report.total_bytes - saved + (sums if shape.microbatches == 1 else 0)
            cost = "the same step, in smaller pieces; weights are gathered for each piece"
            found.append(Fix(changes={"microbatches": count}, cost=cost, estimate_bytes=estimate))
    return found


def _other_remat(shape: JobShape, report: MemoryReport) -> list[Fix]:
    kept = _amount(report, "activations")
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


def _smaller_optimizer(shape: JobShape, report: MemoryReport) -> list[Fix]:
    state = _amount(report, "optimizer state")
    found: list[Fix] = []
    if shape.optimizer == "adamw" and state:
        cost = "the first moment in half the bits"
        saved = state // 4 if shape.param_dtype == "float32" else 0
        if saved:
            changes = {"optimizer": "adamw mu=bfloat16"}
            found.append(Fix(changes=changes, cost=cost, estimate_bytes=report.total_bytes - saved))
    if shape.optimizer.startswith("adamw") and state:
        cost = "another optimizer: factored second moments, no first"
        estimate = report.total_bytes - state
        found.append(Fix(changes={"optimizer": "adafactor"}, cost=cost, estimate_bytes=estimate))
    return found


def _other_mesh(shape: JobShape) -> list[Fix]:
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


def _smaller_batch(shape: JobShape, report: MemoryReport) -> list[Fix]:
    step = shape.batch_ways * shape.microbatches
    moving = _amount(report, "activations", "temporaries")
    found: list[Fix] = []
    pieces = shape.batch_size // step
    for smaller in sorted({pieces * 3 // 4, pieces // 2, pieces // 4, 1}, reverse=True):
        if 0 < smaller < pieces:
            estimate = report.total_bytes - moving + moving * smaller // pieces
            cost = "fewer tokens in a step, so more steps"
            changes = {"batch_size": smaller * step}
            found.append(Fix(changes=changes, cost=cost, estimate_bytes=estimate))
    return found


def _smaller_weights(shape: JobShape, report: MemoryReport) -> list[Fix]:
    if shape.param_dtype != "float32":
        return []
    saved = _amount(report, "parameters", "optimizer state") // 2
    return [
        Fix(
            changes={
                "model": {**shape.model_changes, "preset": shape.model, "param_dtype": "bfloat16"}
            },
            cost="weights and optimizer state in half the bits: small updates are lost",
            estimate_bytes=report.total_bytes - saved,
        )
    ]


def _together(fixes: list[Fix], report: MemoryReport) -> Fix | None:
    """The largest saving of each kind, all at once."""
    best: dict[str, Fix] = {}
    for fix in fixes:
        key = next(iter(fix.changes))
        if key == "batch_size" or fix.estimate_bytes is None:
            continue
        if key not in best or fix.estimate_bytes < (best[key].estimate_bytes or 0):
            best[key] = fix
    if len(best) < 2:
        return None
    saved = sum(report.total_bytes - (fix.estimate_bytes or 0) for fix in best.values())
    # Savings of different kinds overlap, so no less is promised than what none of them can touch.
    touched = _amount(report, "activations", "temporaries", "optimizer state")
    floor = report.total_bytes - touched - _amount(report, "parameters") // 2
    changes: dict[str, Any] = {}
    for fix in best.values():
        changes.update(fix.changes)
    return Fix(
        changes=changes,
        cost="all of these together",
        estimate_bytes=max(floor, report.total_bytes - saved),
    )


def _yaml(value: object) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key}: {item}" for key, item in value.items())  # pyright: ignore[reportUnknownVariableType]  plain data
        return f"{{{inside}}}"
    return str(value)
