"""The content of the screen at one moment: hosts and chips with their last minute, and the run."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from rich.console import RenderableType

from ...hardware.figure import Figure
from ...shown import Facts, Shown
from ..readings import Reading
from ..runs.goodput import RunGoodput
from ..runs.summary import RunSummary
from ..stragglers.comparison import StragglerReport
from ..stragglers.detection import is_typical

HISTORY_S = 60.0
# A monitor writes an unchanged reading once per minute, so older readings are stale.
STALE_S = 150.0
SPARKLED = ("duty_cycle", "host_cpu_utilization")


@dataclass(frozen=True)
class ChipView(Facts):
    """The newest figures of one chip.

    Attributes:
        chip: Its index on its host.
        values: By metric; other metrics are missing.
        history: Its duty cycle in the last minute, oldest first.
    """

    chip: int
    values: Mapping[str, float]
    history: Sequence[float] = ()


@dataclass(frozen=True)
class HostView(Facts):
    """The newest figures of one host.

    Attributes:
        name: The machine's name.
        process: Its process index.
        values: The host's own figures by metric.
        chips: In order.
        missing: Missing metrics, each with the reason.
        history: Its CPU utilization in the last minute, oldest first.
        time: Unix seconds of its newest reading.
    """

    name: str
    process: int
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    chips: tuple[ChipView, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    history: Sequence[float] = ()
    time: float = 0.0
    _facts = ("name", "process", "time", "values", "chips", "missing", "history")


class Fleet:
    """Keeps the newest reading of each host and source, and a minute of history."""

    def __init__(self) -> None:
        self._newest: dict[tuple[str, int], dict[str, Reading]] = {}
        self._history: dict[tuple[str, int, int | None], deque[tuple[float, float]]] = {}

    def take(self, readings: Iterable[Reading]) -> None:
        """Add readings, in order of time for each source."""
        for reading in readings:
            host = (reading.host, reading.process)
            before = self._newest.setdefault(host, {}).get(reading.source)
            if before is not None and before.time >= reading.time:
                continue
            self._newest[host][reading.source] = reading
            for sample in reading.samples:
                if sample.metric in SPARKLED:
                    key = (*host, sample.chip)
                    past = self._history.setdefault(key, deque(maxlen=600))
                    past.append((reading.time, sample.value))
                    while past and past[0][0] < reading.time - HISTORY_S:
                        past.popleft()

    def process_on(self, host: str) -> int | None:
        """Return the run's process on a host; None without a reading of the host."""
        return min((process for name, process in self._newest if name == host), default=None)

    def views(self, *, now: float) -> tuple[list[HostView], int]:
        """Return the hosts with recent readings, and the number of other hosts."""
        hosts: list[HostView] = []
        silent = 0
        for (name, process), sources in self._newest.items():
            fresh = [reading for reading in sources.values() if now - reading.time <= STALE_S]
            if fresh:
                hosts.append(self._view(name, process, fresh))
            else:
                silent += 1
        return sorted(hosts, key=lambda host: (host.process, host.name)), silent

    def _view(self, name: str, process: int, readings: list[Reading]) -> HostView:
        own: dict[str, float] = {}
        chips: dict[int, dict[str, float]] = {}
        missing: dict[str, str] = {}
        for reading in sorted(readings, key=attrgetter("time")):
            missing |= reading.missing
            seen: set[tuple[str, int | None]] = set()
            for sample in reading.samples:
                if not is_typical(sample.labels):
                    continue
                values = own if sample.chip is None else chips.setdefault(sample.chip, {})
                again = (sample.metric, sample.chip) in seen  # the worst of several links counts
                before = values.get(sample.metric, sample.value) if again else sample.value
                values[sample.metric] = max(before, sample.value)
                seen.add((sample.metric, sample.chip))
        given = own.keys() | {metric for values in chips.values() for metric in values}
        return HostView(
            name,
            process,
            own,
            tuple(
                ChipView(chip, chips[chip], self._past(name, process, chip))
                for chip in sorted(chips)
            ),
            {metric: why for metric, why in missing.items() if metric not in given},
            self._past(name, process, None),
            max(reading.time for reading in readings),
        )

    def _past(self, name: str, process: int, chip: int | None) -> list[float]:
        return [value for _, value in self._history.get((name, process, chip), ())]


@dataclass(frozen=True)
class Training(Facts):
    """The run on the screen.

    Attributes:
        summary: Its state and figures.
        goodput: Its time by cause, over all attempts.
        stragglers: Its slow hosts.
        losses: Losses of the newest steps, oldest first.
        up_s: Seconds since its last attempt began.
    """

    summary: RunSummary
    goodput: RunGoodput
    stragglers: StragglerReport
    losses: tuple[float, ...] = ()
    up_s: float | None = None
    _facts = ("summary", "goodput", "stragglers", "up_s")


@dataclass(frozen=True)
class Snapshot(Shown):
    """One moment.

    Attributes:
        time: Unix seconds.
        title: The slice, or this machine's accelerators.
        versions: Of jax and libtpu on this machine.
        cost_per_hour: The slice's list price.
        hosts: Hosts with recent readings.
        training: The run, if there is one.
        notes: Silent hosts and files that cannot be read.
    """

    time: float
    title: str
    versions: dict[str, str] = field(default_factory=dict[str, str])
    cost_per_hour: Figure | None = None
    hosts: tuple[HostView, ...] = ()
    training: Training | None = None
    notes: tuple[str, ...] = ()

    def __rich__(self) -> RenderableType:
        from .screen import Screen

        return Screen(self)

    def missing(self) -> dict[str, str]:
        """Return the metrics that no host has, each with a reason."""
        reasons = {name: why for host in self.hosts for name, why in host.missing.items()}
        given = {name for host in self.hosts for name in host.values}
        given |= {name for host in self.hosts for chip in host.chips for name in chip.values}
        return {name: why for name, why in reasons.items() if name not in given}
