"""Readings of any number of hosts, put together chip by chip, with the last minute of each."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..readings import Reading
from ..stragglers.chip_signs import is_typical

HISTORY_S = 60.0
# A monitor writes an unchanged reading once a minute: what is older than two is not known any more.
STALE_S = 150.0
SPARKLED = ("duty_cycle", "host_cpu_utilization")


@dataclass(frozen=True)
class ChipView:
    """One chip now.

    Attributes:
        chip: Its index on its host.
        values: By metric; what is not here is missing.
        history: Its duty cycle in the last minute, oldest first.
    """

    chip: int
    values: Mapping[str, float]
    history: Sequence[float] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"chip": self.chip, "values": dict(self.values), "history": list(self.history)}


@dataclass(frozen=True)
class HostView:
    """One host now.

    Attributes:
        name: The machine's name.
        process: Its process of the run.
        values: Of the host itself, by metric.
        chips: In order.
        missing: Metrics nobody gave, each with the reason.
        history: How busy its CPUs were in the last minute, oldest first.
        time: Unix seconds of its newest reading.
    """

    name: str
    process: int
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    chips: tuple[ChipView, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    history: Sequence[float] = ()
    time: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "process": self.process,
            "time": self.time,
            "values": dict(self.values),
            "chips": [chip.to_dict() for chip in self.chips],
            "missing": dict(self.missing),
            "history": list(self.history),
        }


class Fleet:
    """Keeps the newest reading of each host and source, and a minute of what is drawn."""

    def __init__(self) -> None:
        self._newest: dict[tuple[str, int], dict[str, Reading]] = {}
        self._history: dict[tuple[str, int, int | None], deque[tuple[float, float]]] = {}

    def take(self, readings: Iterable[Reading]) -> None:
        """Take in readings, in the order of their time for each source."""
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
        """Return the process of the run that is on a host; None before any was heard of."""
        return min((process for name, process in self._newest if name == host), default=None)

    def views(self, *, now: float) -> tuple[list[HostView], int]:
        """Return the hosts that spoke lately, by process, and how many others fell silent."""
        hosts: list[HostView] = []
        silent = 0
        for (name, process), sources in self._newest.items():
            fresh = [one for one in sources.values() if now - one.time <= STALE_S]
            if fresh:
                hosts.append(self._view(name, process, fresh))
            else:
                silent += 1
        return sorted(hosts, key=lambda host: (host.process, host.name)), silent

    def _view(self, name: str, process: int, readings: list[Reading]) -> HostView:
        own: dict[str, float] = {}
        chips: dict[int, dict[str, float]] = {}
        missing: dict[str, str] = {}
        for reading in sorted(readings, key=lambda one: one.time):
            missing |= reading.missing
            seen: set[tuple[str, int | None]] = set()
            for sample in reading.samples:
                if not is_typical(sample.labels):
                    continue
                values = own if sample.chip is None else chips.setdefault(sample.chip, {})
                again = (sample.metric, sample.chip) in seen  # of several links the worst counts
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
            max(one.time for one in readings),
        )

    def _past(self, name: str, process: int, chip: int | None) -> list[float]:
        return [value for _, value in self._history.get((name, process, chip), ())]
