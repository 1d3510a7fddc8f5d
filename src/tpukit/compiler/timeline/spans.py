"""What a simulation records: spans on tracks, and where the step's time went."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

# Why the core was busy or waited. Order is the order of reports.
CAUSES = ("matrix", "hbm", "vector", "kernel", "ici", "dcn", "host", "overhead")


@dataclass(frozen=True)
class Span:
    """One op on one track, from the first time it runs.

    Attributes:
        track: "core", "hbm", "ici x" (the axes it uses), "dcn", "host".
        cause: What bounds it, one of `CAUSES`, or "loop".
        times: How often it runs in a step (its share of enclosing loops included).
    """

    track: str
    name: str
    start_s: float
    duration_s: float
    cause: str
    op_name: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    times: int = 1

    def to_dict(self) -> dict[str, Any]:
        """The span as plain data."""
        return dict(vars(self))


@dataclass
class Ledger:
    """Collects spans and sums seconds by cause while a simulation runs."""

    spans: list[Span] = field(default_factory=list[Span])
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    hidden_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    formats: set[str] = field(default_factory=set[str])
    unknown_loops: list[str] = field(default_factory=list[str])
    unknown_kernels: list[str] = field(default_factory=list[str])

    def charge(self, cause: str, seconds: float, times: int) -> None:
        """Add core time (work or waiting) to a cause."""
        if seconds > 0:
            self.seconds[cause] += seconds * times

    def overlap(self, cause: str, seconds: float, times: int) -> None:
        """Add the whole length of an asynchronous op, hidden or not."""
        self.hidden_s[cause] += seconds * times
