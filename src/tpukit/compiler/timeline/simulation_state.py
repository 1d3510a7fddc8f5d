"""The state of a simulation: engines beside the core, their clock, and what was recorded."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from ..hlo import Computation
from .machine import Machine

# Why the core was busy or waited. Order is the order of reports.
CAUSES = ("matrix", "hbm", "vector", "kernel", "ici", "dcn", "host", "overhead")


@dataclass
class Engine:
    """A queue of bytes that drains at a rate while the core does something else."""

    bytes_per_s: float
    queue: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])

    def drain(self, seconds: float) -> None:
        """Let the engine work for a while."""
        budget = seconds * self.bytes_per_s
        while self.queue and budget > 0:
            name, left = self.queue[0]
            if left > budget:
                self.queue[0] = (name, left - budget)
                return
            budget -= left
            self.queue.pop(0)

    def seconds_until(self, name: str) -> float:
        """How long until `name` is through, if nothing else slows the engine."""
        waiting = 0.0
        for queued, left in self.queue:
            waiting += left
            if queued == name:
                return waiting / self.bytes_per_s
        return 0.0


@dataclass
class Frame:
    """One computation while it runs: its clock, its engines, what it waits for.

    Attributes:
        times: How often it runs in a step, loops around it included.
        offset: When its first run starts.
        lanes: When each lane of the network is free again.
        pending: What was started and not awaited: its engine, or its network and when it finishes.
        alias: Names that stand for a started op, seen through tuples and updates.
    """

    machine: Machine
    computation: Computation
    times: int
    offset: float
    now: float = 0.0
    lanes: dict[str, float] = field(default_factory=dict[str, float])
    pending: dict[str, tuple[str, float | None]] = field(
        default_factory=dict[str, tuple[str, float | None]]
    )
    alias: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        hbm_rate = self.machine.hbm_bytes_per_s * self.machine.hbm_efficiency
        host_rate = self.machine.host_bytes_per_s
        self.engines = {
            "hbm": Engine(hbm_rate),
            "to host": Engine(host_rate),  # PCIe carries both ways at once
            "from host": Engine(host_rate),
        }

    def advance(self, seconds: float, *, hbm_s: float = 0.0) -> None:
        """Let time pass on the core; for `hbm_s` of it the core itself used HBM."""
        self.now += seconds
        for name, engine in self.engines.items():
            engine.drain(max(0.0, seconds - hbm_s) if name == "hbm" else seconds)

    def enqueue(self, engine: str, name: str, amount: float) -> float:
        """Start a copy of `amount` bytes; returns its length on an idle engine."""
        self.engines[engine].queue.append((name, amount))
        self.pending[name] = (engine, None)
        return amount / self.engines[engine].bytes_per_s

    def occupy(self, network: str, name: str, lanes: frozenset[str], seconds: float) -> float:
        """Start a transfer once its lanes are free; returns when it begins."""
        begin = self.free_at(lanes)
        self.lanes.update(dict.fromkeys(lanes, begin + seconds))
        self.pending[name] = (network, begin + seconds)
        return begin

    def free_at(self, lanes: frozenset[str]) -> float:
        """When all of `lanes` are free, now at the earliest."""
        return max([self.now, *(self.lanes.get(lane, 0.0) for lane in lanes)])

    def finish(self, name: str) -> tuple[str, float]:
        """What `name` was waited for on, and how long from now; it is no longer pending."""
        waited_on, finish = self.pending.pop(name)
        if finish is None:
            return waited_on, self.engines[waited_on].seconds_until(name)
        return waited_on, max(0.0, finish - self.now)

    def source(self, name: str) -> str:
        """The started op a name stands for."""
        while name in self.alias:
            name = self.alias[name]
        return name


@dataclass(frozen=True)
class TrackSpan:
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
class SpanCollector:
    """Collects spans and sums seconds by cause while a simulation runs."""

    spans: list[TrackSpan] = field(default_factory=list[TrackSpan])
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
