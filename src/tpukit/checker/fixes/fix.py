"""One change to a job, what it should save, and what a compile said of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...compiler.memory import MemoryReport
from ...hardware.figure import format_quantity
from ...shown import Shown


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One change to a job.

    Attributes:
        changes: New values by key of the job; those of a section by dotted path.
        cost: What it costs to live with.
        estimate_bytes: Total HBM by arithmetic, or None with `estimate_reason`.
        verified_bytes: Total HBM by a compile; None when none was made.
        fits: What the compile said.
        failure: Why the compile gave no answer.
        advice: Why no compile can prove it from outside; "" where one can.
    """

    changes: Mapping[str, Any]
    cost: str
    estimate_bytes: int | None = None
    estimate_reason: str = ""
    usable_bytes: int | None = None
    verified_bytes: int | None = None
    fits: bool | None = None
    failure: str = ""
    advice: str = ""

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
            "advice": self.advice,
        }


@dataclass(frozen=True)
class FixList(Shown):
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
            compiled = "advice" if fix.advice else _size(fix.verified_bytes)
            row = (fix.text, _size(fix.estimate_bytes), compiled, fix.cost)
            table.add_row(Text(mark, style=style), *map(Text, row))
        for fix in self.fixes:
            if fix.failure:
                table.add_row("", Text(fix.text), "", Text("failed", style="red"), fix.failure)
        return table


def _size(amount: int | None) -> str:
    return "–" if amount is None else format_quantity(amount, "B")


def _yaml(value: object) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key}: {item}" for key, item in value.items())  # pyright: ignore[reportUnknownVariableType]  plain data
        return f"{{{inside}}}"
    return str(value)
