"""Attribute the time of each device: every nanosecond of the window gets exactly one kind.

On one device several things happen at once: ops on several streams, copies beside them, the host
behind them. The first of these conditions that holds at a moment determines its kind:

1. an op that computes or moves memory runs (several at once share the moment);
2. a collective runs that nothing hides (it is *exposed*);
3. the device exchanges something with the host: a copy, an infeed, a callback;
4. a program is running and none of its ops is: the cost of starting ops; 5. the host compiles: the
moment is excluded, because a warm program does not compile;
6. the host copies from or to the device;
7. the host launches a program;
8. none of them: the device waits for the host's next batch.

1 counts as compute or memory, 2 as communication, 3, 6 and 8 as input, 4 and 7 as overhead.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .judging import (
    COMMUNICATION,
    COMPUTE,
    INPUT,
    KINDS,
    MEMORY,
    OVERHEAD,
    Judged,
    Roof,
    judge,
    roof_of,
)
from .recording import DeviceTrack, HostRecording, Interval, OpEvent, Recording

# Slots of the sweep; the lowest occupied slot determines the kind of a moment.
_COMPUTES, _MOVES, _EXCHANGES, _COPIES_BESIDE, _HOSTED, _UNDER_WAY = range(6)
_COMPILES, _TRANSFERS, _LAUNCHES = range(6, 9)
_SLOTS = 9
_SLOT_OF = {COMPUTE: _COMPUTES, MEMORY: _MOVES, COMMUNICATION: _EXCHANGES, INPUT: _HOSTED}
_KIND_OF = {
    _EXCHANGES: COMMUNICATION,
    _COPIES_BESIDE: MEMORY,
    _HOSTED: INPUT,
    _UNDER_WAY: OVERHEAD,
    _TRANSFERS: INPUT,
    _LAUNCHES: OVERHEAD,
}


@dataclass
class OpTotal:
    """All runs of one op in the window, over all devices of a recording.

    Attributes:
        name: The HLO instruction, or a kernel without one.
        seconds: Of all runs, hidden or not.
        times: Number of runs.
    """

    name: str
    program: str
    judged: Judged
    seconds: float = 0.0
    times: int = 0

    @property
    def op_name(self) -> str:
        """Where in the user's program it comes from, as jax wrote it."""
        return self.judged.facts.op_name if self.judged.facts else ""

    @property
    def source(self) -> str:
        """The line it comes from, or ""."""
        return self.judged.facts.source if self.judged.facts else ""


@dataclass
class DeviceTime:
    """The time of one device by kind.

    Attributes:
        seconds: By kind; they add up to the window less `compile_s`.
        compile_s: Time in which the host compiled and the device did nothing.
        copy_s: The part of input in which something was copied from or to the host.
        waits: Intervals in which the profile shows no activity.
    """

    name: str
    window: Interval
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    compile_s: float = 0.0
    copy_s: float = 0.0
    waits: list[Interval] = field(default_factory=list[Interval])

    @property
    def counted_s(self) -> float:
        """The window less compiling."""
        return sum(self.seconds.values())

    @property
    def busy_s(self) -> float:
        """Time in which the device computed, moved memory or talked to other devices."""
        return sum(self.seconds[kind] for kind in (COMPUTE, MEMORY, COMMUNICATION))


@dataclass(frozen=True)
class HostTimes:
    """One host of a recording: its devices' time by kind and by op."""

    host: HostRecording
    devices: tuple[DeviceTime, ...]
    ops: tuple[OpTotal, ...]
    roof: Roof | None


def attribute(recording: Recording) -> list[HostTimes]:
    """Attribute the time of every device of a recording."""
    kind = recording.device_kind
    return [_attribute_host(host, kind) for host in recording.hosts]


def _attribute_host(host: HostRecording, device_kind: str) -> HostTimes:
    totals: dict[tuple[str, int | None, str], OpTotal] = {}
    devices: list[DeviceTime] = []
    roof: Roof | None = None
    for track in host.devices:
        roof = roof_of(track, device_kind if track.platform == "TPU" else "")
        verdicts: dict[tuple[str, int | None, str, str], Judged] = {}
        judged: list[tuple[OpEvent, Judged]] = []
        for op in track.ops:
            key = op.program, op.program_id, op.name, op.kernel
            if key not in verdicts:
                verdicts[key] = judge(op, host, roof)
            judged.append((op, verdicts[key]))
        devices.append(_sweep(track, judged, host))
        _add_up(judged, host.window, totals)
    ordered = sorted(totals.values(), key=lambda total: -total.seconds)
    return HostTimes(host, tuple(devices), tuple(ordered), roof)


def _add_up(
    judged: Iterable[tuple[OpEvent, Judged]],
    window: Interval,
    totals: dict[tuple[str, int | None, str], OpTotal],
) -> None:
    for op, verdict in judged:
        span = _clipped(op.start, op.end, window)
        # An asynchronous op costs time only where an op of the core waits for it.
        if span is None or verdict.is_control or op.is_async:
            continue
        name = verdict.facts.name if verdict.facts else op.own_name
        key = op.program, op.program_id, name
        total = totals.setdefault(key, OpTotal(name, op.program, verdict))
        total.seconds += (span[1] - span[0]) / 1e9
        total.times += 1


def _sweep(
    track: DeviceTrack, judged: Iterable[tuple[OpEvent, Judged]], host: HostRecording
) -> DeviceTime:
    """Visit every moment at which an event begins or ends, in order."""
    changes: defaultdict[float, list[tuple[int, int]]] = defaultdict(list)
    for slot, start, end in _occupied(track, judged, host):
        span = _clipped(start, end, host.window)
        if span is not None:
            changes[span[0]].append((slot, 1))
            changes[span[1]].append((slot, -1))
    spent = DeviceTime(track.name, host.window)
    counts = [0] * _SLOTS
    before, after = host.window
    for moment in sorted(changes):
        _charge(spent, counts, before, moment)
        for slot, step in changes[moment]:
            counts[slot] += step
        before = moment
    _charge(spent, counts, before, after)
    return spent


def _occupied(
    track: DeviceTrack, judged: Iterable[tuple[OpEvent, Judged]], host: HostRecording
) -> Iterator[tuple[int, float, float]]:
    """Yield slot, start and end of every event."""
    for op, verdict in judged:
        slot = _SLOT_OF.get(verdict.kind, _UNDER_WAY)
        if op.is_async and slot in (_COMPUTES, _MOVES):
            slot = _COPIES_BESIDE
        yield slot, op.start, op.end
    for start, end in track.runs:
        yield _UNDER_WAY, start, end
    for slot, events in (
        (_COMPILES, host.host.compiling),
        (_TRANSFERS, host.host.transfers),
        (_LAUNCHES, host.host.launching),
    ):
        for event in events:
            yield slot, event.start, event.end


def _charge(spent: DeviceTime, counts: list[int], start: float, end: float) -> None:
    seconds = (end - start) / 1e9
    if seconds <= 0:
        return
    working = counts[_COMPUTES] + counts[_MOVES]
    if working:
        spent.seconds[COMPUTE] += seconds * counts[_COMPUTES] / working
        spent.seconds[MEMORY] += seconds * counts[_MOVES] / working
        return
    slot = next((slot for slot in range(_EXCHANGES, _SLOTS) if counts[slot]), None)
    if slot is None:
        spent.seconds[INPUT] += seconds
        spent.waits.append((start, end))
    elif slot == _COMPILES:
        spent.compile_s += seconds
    else:
        spent.seconds[_KIND_OF[slot]] += seconds
        spent.copy_s += seconds * (slot in (_HOSTED, _TRANSFERS))


def _clipped(start: float, end: float, window: Interval) -> Interval | None:
    start, end = max(start, window[0]), min(end, window[1])
    return (start, end) if end > start else None
