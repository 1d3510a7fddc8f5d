"""What can be pointed at: copies to and from the host, ops that were not fused, waits for input."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .attribution import HostTimes
from .call_stacks import CallStacks
from .judging import INPUT

# Looking up who called takes a walk over all calls, so only the longest are looked up.
WAITS_NAMED, COPIES_NAMED = 200, 500
UNKNOWN, SHORTER = "source not recorded", "shorter ones, from anywhere"


@dataclass
class ProfileFinding:
    """One thing that takes time, and where in the user's code it comes from.

    Attributes:
        what: A copy, an op, a wait.
        where: "model.py:12", or the functions that ran, innermost first.
        seconds: All of them together.
        times: How many.
    """

    what: str
    where: str
    seconds: float = 0.0
    times: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))

    def __str__(self) -> str:
        return f"{self.what} at {self.where}" if self.where != UNKNOWN else self.what


@dataclass(frozen=True)
class Findings:
    """What was found in a recording, each list with the most time first.

    Attributes:
        transfers: Copies between host and device, inside programs and outside.
        unfused: Ops that run alone although they only move data or do one thing an element.
        waits: Functions that ran while a device had nothing to do.
    """

    transfers: tuple[ProfileFinding, ...] = ()
    unfused: tuple[ProfileFinding, ...] = ()
    waits: tuple[ProfileFinding, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {name: [one.to_dict() for one in found] for name, found in vars(self).items()}


def find(times: Sequence[HostTimes]) -> Findings:
    """Find them in an attributed recording."""
    transfers: dict[tuple[str, str], ProfileFinding] = {}
    unfused: dict[tuple[str, str], ProfileFinding] = {}
    waits: dict[tuple[str, str], ProfileFinding] = {}
    for one in times:
        # Functions that began before the trace are not in it; the block's own line is.
        stacks = CallStacks(one.host.host.calls, outermost=one.host.annotations.get("caller", ""))
        _add_transfers(one, stacks, transfers)
        for op in one.ops:
            facts = op.judged.facts
            if facts is not None and facts.is_unfused:
                where = facts.source or facts.op_name or UNKNOWN
                _add(unfused, f"{op.name} ({facts.opcode})", where, op.seconds, op.times)
        _add_waits(one, stacks, waits)
    return Findings(_ordered(transfers), _ordered(unfused), _ordered(waits))


def _add_transfers(
    times: HostTimes, stacks: CallStacks, found: dict[tuple[str, str], ProfileFinding]
) -> None:
    for op in times.ops:
        if op.judged.kind == INPUT:
            facts = op.judged.facts
            where = (facts.source or facts.op_name if facts else "") or UNKNOWN
            _add(found, op.name, where, op.seconds, op.times)
    start, end = times.host.window
    inside = [one for one in times.host.host.transfers if start <= one.start and one.end <= end]
    inside.sort(key=lambda event: event.start - event.end)
    for number, event in enumerate(inside):
        where = SHORTER
        if number < COPIES_NAMED:
            middle = (event.start + event.end) / 2
            where = stacks.place(middle, thread=event.thread) or UNKNOWN
        _add(found, event.name, where, (event.end - event.start) / 1e9, 1)


def _add_waits(
    times: HostTimes, stacks: CallStacks, found: dict[tuple[str, str], ProfileFinding]
) -> None:
    """Name the longest waits; of several devices that wait at once the first stands for all."""
    if not times.devices:
        return
    launching = [event.thread for event in times.host.host.launching]
    thread = max(set(launching), key=launching.count) if launching else None
    longest = sorted(times.devices[0].waits, key=lambda wait: wait[0] - wait[1])[:WAITS_NAMED]
    for start, end in longest:
        where = stacks.place((start + end) / 2, thread=thread) or UNKNOWN
        _add(found, "wait", where, (end - start) / 1e9, 1)


def _add(
    found: dict[tuple[str, str], ProfileFinding], what: str, where: str, seconds: float, times: int
) -> None:
    entry = found.setdefault((what, where), ProfileFinding(what, where))
    entry.seconds += seconds
    entry.times += times


def _ordered(found: dict[tuple[str, str], ProfileFinding]) -> tuple[ProfileFinding, ...]:
    return tuple(sorted(_kept(found.values()), key=lambda one: -one.seconds))


def _kept(found: Iterable[ProfileFinding]) -> Iterable[ProfileFinding]:
    return (one for one in found if one.seconds > 0)
