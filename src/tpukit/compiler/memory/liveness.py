"""When each value is alive, and how much of the shared heap is in use at each moment."""

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from .assignment import BufferAllocation, Value

_POSITION = re.compile(r"    (\d+):(\S+)")
_RANGE = re.compile(r"    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)")


@dataclass(frozen=True)
class Schedule:
    """The whole program as one flat order, loop bodies in place, and the life of each value.

    Attributes:
        instructions: Names in the order in which they are issued.
        ranges: First and last position of each value, by its key.
    """

    instructions: tuple[str, ...]
    ranges: dict[str, tuple[int, int]]

    @cached_property
    def position(self) -> dict[str, int]:
        """Where each instruction stands."""
        return {name: index for index, name in enumerate(self.instructions)}


@dataclass(frozen=True)
class Tenancy:
    """Values that follow each other at one address without a gap: one buffer of the heap.

    Updates in place and what a loop hands on share a place, so their lives touch.
    """

    offset: int
    size_bytes: int
    start: int
    end: int
    values: tuple[Value, ...]


def parse_live_ranges(text: str) -> Schedule:
    """Read a live-range listing; an empty or foreign text gives an empty schedule."""
    order: dict[int, str] = {}
    ranges: dict[str, tuple[int, int]] = {}
    section = ""
    for line in text.splitlines():
        if not line.startswith("    "):
            section = line.strip()
        elif section == "InstructionSequence:" and (found := _POSITION.fullmatch(line)):
            order[int(found[1])] = found[2]
        elif section == "BufferLiveRange:" and (found := _RANGE.fullmatch(line)):
            ranges[found[1] + found[2]] = (int(found[3]), int(found[4]))
    return Schedule(tuple(order[index] for index in sorted(order)), ranges)


def find_tenancies(heap: BufferAllocation, schedule: Schedule) -> list[Tenancy]:
    """The buffers that share a heap, each with its life; values without a known life are left out.

    Values are joined when they lie at the same address and their lives overlap.
    """
    blocks: defaultdict[tuple[int, int], list[Value]] = defaultdict(list)
    for value in heap.values:
        if value.key in schedule.ranges:
            blocks[value.offset, value.size_bytes].append(value)
    found: list[Tenancy] = []
    for (offset, size), values in blocks.items():
        values.sort(key=lambda value: schedule.ranges[value.key])
        group: list[Value] = []
        start = end = 0
        for value in values:
            first, last = schedule.ranges[value.key]
            if group and first > end:
                found.append(Tenancy(offset, size, start, end, tuple(group)))
                group = []
            if not group:
                start, end = first, last
            group.append(value)
            end = max(end, last)
        found.append(Tenancy(offset, size, start, end, tuple(group)))
    return found


def heap_use(tenancies: list[Tenancy], length: int) -> list[int]:
    """Bytes of the heap in use at each position of the schedule."""
    change = [0] * (length + 2)
    for one in tenancies:
        change[one.start] += one.size_bytes
        change[one.end + 1] -= one.size_bytes
    use: list[int] = []
    level = 0
    for step in change[: length + 1]:
        level += step
        use.append(level)
    return use
