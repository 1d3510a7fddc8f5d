"""Costs with a source line: copies to and from the host, unfused ops, waits for input."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ...shown import Facts
from .attribution import HostTimes
from .judging import INPUT
from .recording import HostEvent

SHOWN = 3
# Files of jax, numpy and this package between the user's line and the runtime. A profile contains
# no folders, so they are recognized by file name.
_PLUMBING = frozenset(
    (
        *("pjit.py", "api.py", "profiler.py", "traceback_util.py", "api_util.py", "util.py"),
        *("array.py", "dispatch.py", "interpreters.py", "pxla.py", "core.py", "config.py"),
        *("tree_util.py", "compiler.py", "indexing.py", "array_methods.py", "tracing.py"),
        *("literals.py", "named_sharding.py", "abstract_arrays.py", "sharding_impls.py", "mlir.py"),
    )
)


@dataclass(frozen=True)
class _Thread:
    calls: list[HostEvent]
    starts: np.ndarray
    ends: np.ndarray


class CallStacks:
    """The calls of a host's threads, looked up by moment.

    Args:
        calls: The recorded calls.
        outermost: The function around all of them, which began before the recording.
    """

    def __init__(self, calls: Iterable[HostEvent], *, outermost: str = "") -> None:
        self._outermost = outermost
        by_thread: defaultdict[str, list[HostEvent]] = defaultdict(list)
        for call in calls:
            by_thread[call.thread].append(call)
        self._threads = {
            name: _Thread(
                thread_calls,
                np.array([call.start for call in thread_calls]),
                np.array([call.end for call in thread_calls]),
            )
            for name, thread_calls in by_thread.items()
        }

    def at(self, moment: float, *, thread: str | None = None) -> list[str]:
        """Return the functions that ran at a moment, innermost first, as "file.py:12 name".

        Args:
            moment: On the clock of the recording.
            thread: The preferred thread; any other that ran Python then, where it ran none.
        """
        order = [thread] if thread in self._threads else []
        for name in [*order, *self._threads]:
            calls = self._threads[name or ""]
            inside = np.flatnonzero((calls.starts <= moment) & (calls.ends > moment))
            if inside.size:
                deepest = sorted(inside, key=lambda index: -calls.starts[index])
                return [calls.calls[index].name for index in deepest]
        return []

    def place(self, moment: float, *, thread: str | None = None) -> str:
        """Return up to three of the user's functions that ran, innermost first; "" if unknown."""
        frames = [name for name in self.at(moment, thread=thread) if _is_users(name)]
        return " ← ".join(frames[:SHOWN]) or self._outermost


def _is_users(name: str) -> bool:
    file, colon, _ = name.partition(":")
    if not colon or not file.endswith(".py") or file in _PLUMBING:
        return False
    return file.removesuffix(".py") not in sys.stdlib_module_names


# Looking up a caller searches all calls, so only the longest are looked up.
WAITS_NAMED, COPIES_NAMED = 200, 500
UNKNOWN, SHORTER = "source not recorded", "shorter ones, from anywhere"


@dataclass
class ProfileFinding(Facts):
    """One thing that takes time, and where in the user's code it comes from.

    Attributes:
        what: "wait", or the name of a copy or an op.
        where: "model.py:12", or the functions that ran, innermost first.
        seconds: Seconds of all occurrences.
        times: Number of occurrences.
    """

    what: str
    where: str
    seconds: float = 0.0
    times: int = 0

    def __str__(self) -> str:
        return f"{self.what} at {self.where}" if self.where != UNKNOWN else self.what


ByPlace: TypeAlias = dict[tuple[str, str], ProfileFinding]
"""Findings by `what` and `where`."""


@dataclass(frozen=True)
class Findings(Facts):
    """The findings in a recording, the costliest first in each list.

    Attributes:
        transfers: Copies between host and device, inside programs and outside.
        unfused: Ops that run alone although they only move data or are elementwise.
        waits: Functions that ran while a device was idle.
    """

    transfers: tuple[ProfileFinding, ...] = ()
    unfused: tuple[ProfileFinding, ...] = ()
    waits: tuple[ProfileFinding, ...] = ()


def find(times: Sequence[HostTimes]) -> Findings:
    """Return the findings in an attributed recording."""
    transfers: ByPlace = {}
    unfused: ByPlace = {}
    waits: ByPlace = {}
    for host_times in times:
        # Functions that began before the trace are not in it; the block's own line is.
        stacks = CallStacks(
            host_times.host.host.calls, outermost=host_times.host.annotations.get("caller", "")
        )
        _add_transfers(host_times, stacks, transfers)
        for op in host_times.ops:
            facts = op.judged.facts
            if facts is not None and facts.is_unfused:
                where = facts.source or facts.op_name or UNKNOWN
                _add(unfused, f"{op.name} ({facts.opcode})", where, op.seconds, op.times)
        _add_waits(host_times, stacks, waits)
    return Findings(_ordered(transfers), _ordered(unfused), _ordered(waits))


def _add_transfers(times: HostTimes, stacks: CallStacks, findings: ByPlace) -> None:
    for op in times.ops:
        if op.judged.kind == INPUT:
            facts = op.judged.facts
            where = (facts.source or facts.op_name if facts else "") or UNKNOWN
            _add(findings, op.name, where, op.seconds, op.times)
    start, end = times.host.window
    inside = [
        transfer
        for transfer in times.host.host.transfers
        if start <= transfer.start and transfer.end <= end
    ]
    inside.sort(key=lambda event: event.start - event.end)
    for number, event in enumerate(inside):
        where = SHORTER
        if number < COPIES_NAMED:
            middle = (event.start + event.end) / 2
            where = stacks.place(middle, thread=event.thread) or UNKNOWN
        _add(findings, event.name, where, (event.end - event.start) / 1e9, 1)


def _add_waits(times: HostTimes, stacks: CallStacks, findings: ByPlace) -> None:
    """Add the longest waits of the first device, which stands for all."""
    if not times.devices:
        return
    launching = [event.thread for event in times.host.host.launching]
    thread = max(set(launching), key=launching.count) if launching else None
    longest = sorted(times.devices[0].waits, key=lambda wait: wait[0] - wait[1])[:WAITS_NAMED]
    for start, end in longest:
        where = stacks.place((start + end) / 2, thread=thread) or UNKNOWN
        _add(findings, "wait", where, (end - start) / 1e9, 1)


def _add(
    findings: ByPlace,
    what: str,
    where: str,
    seconds: float,
    times: int,
) -> None:
    entry = findings.setdefault((what, where), ProfileFinding(what, where))
    entry.seconds += seconds
    entry.times += times


def _ordered(findings: ByPlace) -> tuple[ProfileFinding, ...]:
    return tuple(sorted(_kept(findings.values()), key=lambda finding: -finding.seconds))


def _kept(findings: Iterable[ProfileFinding]) -> Iterable[ProfileFinding]:
    return (finding for finding in findings if finding.seconds > 0)
