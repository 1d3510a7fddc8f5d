"""Everything that the screen shows at one moment, as data."""

from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType

from ...hardware.figure import Figure
from ...shown import Shown
from ..runs.goodput import RunGoodput
from ..runs.summary import RunSummary
from ..stragglers.report import StragglerReport
from .fleet import HostView


@dataclass(frozen=True)
class Training:
    """The run that is trained.

    Attributes:
        summary: How it is doing.
        goodput: Where its time went, across attempts.
        stragglers: Its slow hosts.
        losses: Of the newest steps, oldest first.
        up_s: Seconds since its last attempt began.
    """

    summary: RunSummary
    goodput: RunGoodput
    stragglers: StragglerReport
    losses: tuple[float, ...] = ()
    up_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "summary": self.summary.to_dict(),
            "goodput": self.goodput.to_dict(),
            "stragglers": self.stragglers.to_dict(),
            "up_s": self.up_s,
        }


@dataclass(frozen=True)
class Snapshot(Shown):
    """One moment.

    Attributes:
        time: Unix seconds.
        title: Slice, or what this machine has.
        versions: Of jax and libtpu, here.
        cost_per_hour: Of the slice, by its list price.
        hosts: Those that spoke lately.
        training: The run, if there is one.
        notes: What a person should know: hosts that fell silent, files that cannot be read.
    """

    time: float
    title: str
    versions: dict[str, str] = field(default_factory=dict[str, str])
    cost_per_hour: Figure | None = None
    hosts: tuple[HostView, ...] = ()
    training: Training | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "time": self.time,
            "title": self.title,
            "versions": dict(self.versions),
            "cost_per_hour": self.cost_per_hour.to_dict() if self.cost_per_hour else None,
            "hosts": [host.to_dict() for host in self.hosts],
            "training": self.training.to_dict() if self.training else None,
            "notes": list(self.notes),
        }

    def __rich__(self) -> RenderableType:
        from .screen import Screen

        return Screen(self)

    def missing(self) -> dict[str, str]:
        """Return the metrics that no host gives, each with a reason."""
        reasons = {name: why for host in self.hosts for name, why in host.missing.items()}
        given = {name for host in self.hosts for name in host.values}
        given |= {name for host in self.hosts for chip in host.chips for name in chip.values}
        return {name: why for name, why in reasons.items() if name not in given}
