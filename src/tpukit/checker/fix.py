"""`Fix`: one change that reduces memory, with its estimate and its compiled result."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..compiler.compiled import CompiledStep
from ..compiler.memory import MemoryReport
from ..errors import TPUError
from ..hardware.figure import format_quantity
from ..plain_data import JsonMapping, JsonObject
from ..shown import Facts, Renderable, Shown

# From the least to the most costly change.
_EFFORT = (
    *("donate", "flags", "microbatches", "remat", "jax.checkpoint", "train.moment_dtype"),
    *("train.optimizer", "mesh", "shard", "batch", "batch_size", "train.param_dtype", "on"),
)
THIN_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Fix(Facts):
    """One change to a job or a captured program.

    Attributes:
        changes: New values by key of the job; those of a section by dotted path.
        cost: The disadvantage of the change.
        estimate_bytes: Estimated total HBM; None with an `estimate_reason`.
        verified_bytes: Total HBM from a compile; None if it was not compiled.
        fits: Whether the compiled program fits; None if it was not compiled.
        failure: The error of the compile; "" if there was none.
        advice: Why only the user can make the change; "" if a compile can prove it.
    """

    changes: JsonMapping
    cost: str
    estimate_bytes: int | None = None
    estimate_reason: str = ""
    usable_bytes: int | None = None
    verified_bytes: int | None = None
    fits: bool | None = None
    failure: str = ""
    advice: str = ""
    _facts = "changes cost fits failure advice"

    @property
    def promising(self) -> bool:
        """Whether it fits by the compile, or by the estimate if it was not compiled."""
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
        """Return the fix with the memory from its compile."""
        return replace(self, verified_bytes=report.total_bytes, fits=report.fits)

    def tried(self, answer: CompiledStep | TPUError) -> "Fix":
        """Return the fix with the result or the error of its compile."""
        if isinstance(answer, TPUError):
            return replace(self, failure=str(answer))
        return self.verified(answer.memory)

    def to_dict(self) -> JsonObject:
        """Return the fix as plain data."""
        return {
            **super().to_dict(),
            "estimate": {
                "value": self.estimate_bytes,
                "origin": "model",
                "reason": self.estimate_reason,
            },
            "verified": {"value": self.verified_bytes, "origin": "compiler"},
        }


@dataclass(frozen=True)
class FixList(Shown):
    """Fixes, the best first."""

    fixes: tuple[Fix, ...] = field(default_factory=tuple[Fix, ...])

    def __rich__(self) -> Renderable:
        from rich.table import Table
        from rich.text import Text

        table = Table("", "change", "estimate (model)", "compiled (compiler)", "what it costs")
        table.box, table.pad_edge = None, False
        for fix in self.fixes:
            mark, style = {True: ("✓", "green"), False: ("✗", "red"), None: ("?", "dim")}[fix.fits]
            compiled = "advice" if fix.advice else _size(fix.verified_bytes)
            row = (fix.text, _size(fix.estimate_bytes), compiled, fix.cost)
            table.add_row(Text(mark, style=style), *map(Text, row))
        for fix in self.fixes:
            if fix.failure:
                table.add_row("", Text(fix.text), "", Text("failed", style="red"), fix.failure)
        return table


def is_thin(report: MemoryReport) -> bool:
    """Whether a program does not fit, or leaves less than `THIN_SHARE` of HBM free."""
    left = report.headroom_bytes
    return not report.fits or (left is not None and left < THIN_SHARE * (report.usable_bytes or 0))


def rank(fixes: list[Fix]) -> FixList:
    """Sort fixes: first those that fit, by effort; then those without an estimate; then by size."""

    def order(fix: Fix) -> tuple[int, int, int]:
        size = fix.verified_bytes if fix.verified_bytes is not None else fix.estimate_bytes
        group = 0 if fix.promising else 1 if size is None and not fix.failure else 2
        effort = max(_EFFORT.index(key) for key in fix.changes if key in _EFFORT)
        return group, effort if group < 2 else 0, size or 0

    return FixList(tuple(sorted(fixes, key=order)))


def worth_showing(fixes: FixList) -> FixList:
    """Return the fixes that may be enough by their estimate or compile.

    If none may be enough, the one with the least memory is kept, to show how much is missing.
    """
    hopeful = tuple(
        fix
        for fix in fixes.fixes
        if fix.promising or (fix.fits is None and not fix.failure and fix.estimate_bytes is None)
    )
    return FixList(hopeful or fixes.fixes[:1])


def _size(amount: int | None) -> str:
    return "–" if amount is None else format_quantity(amount, "B")


def _yaml(value: object) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key}: {item}" for key, item in value.items())  # pyright: ignore[reportUnknownVariableType]  plain data
        return f"{{{inside}}}"
    return str(value)
