"""`StragglerReport`: the hosts that hold a run up, each with its cause and what shows it."""

from dataclasses import dataclass
from typing import Any, Literal

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ...shown import Shown

Cause = Literal["input", "checkpoint", "link", "chip", "host"]
ADVICE: dict[Cause, str] = {
    "input": "look at its disk, its network to the data and its CPUs; `tpukit data inspect`",
    "checkpoint": "look at its path to the checkpoint storage",
    "link": "have the host's links checked, and take it out of the slice",
    "chip": "have the host replaced: the chip is slowed down or does less than the others",
    "host": "look for other work on that machine",
}


@dataclass(frozen=True, kw_only=True)
class Straggler(Shown):
    """A host that is slower than the others.

    Attributes:
        host: Its name.
        process: Its process of the run.
        cause: What it is slow at.
        evidence: The figures that show it, beside those of the others (measured).
        share: Of the run's time that the others wait for it; None where only chips were read.
    """

    host: str
    process: int
    cause: Cause
    evidence: str
    share: float | None = None

    @property
    def advice(self) -> str:
        """What to look at."""
        return ADVICE[self.cause]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "host": self.host,
            "process": self.process,
            "cause": self.cause,
            "evidence": self.evidence,
            "share": self.share,
            "advice": self.advice,
        }

    def __str__(self) -> str:
        lost = "" if self.share is None else f", others wait {self.share:.0%} of the time"
        return (
            f"{self.host} (process {self.process}) is slow at {self.cause}{lost}: {self.evidence}"
        )


@dataclass(frozen=True, kw_only=True)
class StragglerReport(Shown):
    """What comparing the hosts of a run gave.

    Attributes:
        found: Slow hosts, the costliest first; empty when none stands out from noise.
        hosts: How many were compared.
        steps: How many steps of each.
        notes: What could not be compared, and why.
    """

    found: tuple[Straggler, ...]
    hosts: int
    steps: int
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.found)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "found": [one.to_dict() for one in self.found],
            "hosts": self.hosts,
            "steps": self.steps,
            "notes": list(self.notes),
            "origin": "measured",
        }

    def __str__(self) -> str:
        if self.found:
            return "; ".join(map(str, self.found))
        compared = f"{self.hosts} hosts over {self.steps} steps"
        return "; ".join([f"no straggler among {compared}", *self.notes])

    def __rich__(self) -> RenderableType:
        if not self.found:
            return Text(str(self))
        table = Table(title=f"stragglers of {self.hosts} hosts, over {self.steps} steps (measured)")
        table.title_justify = "left"
        for name in ("host", "slow at", "others wait", "what shows it", "look at"):
            table.add_column(name)
        for one in self.found:
            share = "–" if one.share is None else f"{one.share:.1%}"
            cells = (one.host, one.cause, share, one.evidence, one.advice)
            table.add_row(*(Text(cell) for cell in cells))
        if self.notes:
            table.caption = Text("; ".join(self.notes))
        return table
