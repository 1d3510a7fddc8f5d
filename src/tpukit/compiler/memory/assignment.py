"""Parsers for the compiler's buffer assignment and live ranges."""

import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from ...errors import XLACompilationError
from ..hlo import Shape, parse_shapes
from ..hlo.shape import HBM, HOST

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(.*):")
_VALUE = re.compile(
    r" value: <\d+ ([^ {>]+)(\{[\d,]*\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
)
_COLOR = re.compile(r", color (\d+)")
_PARAMETER = re.compile(r", parameter (\d+)")


@dataclass(frozen=True)
class Value:
    """One array (or tuple table) at an offset in an allocation.

    Attributes:
        instruction: The instruction that computes it.
        index: Which leaf of the instruction's result it is, e.g. "{}" or "{1}".
        is_phi: Whether it only merges other values where control flow joins.
    """

    instruction: str
    index: str
    is_phi: bool
    size_bytes: int
    offset: int
    type_text: str

    @property
    def key(self) -> str:
        """Its name in the list of live ranges."""
        return self.instruction + self.index

    @cached_property
    def shape(self) -> Shape | None:
        """The array, or None for a tuple's table of addresses."""
        if self.type_text.startswith("("):
            return None
        found = parse_shapes(self.type_text)
        return found[0] if len(found) == 1 else None

    @property
    def layout_text(self) -> str:
        """Its memory layout as the compiler writes it, e.g. "{1,0:T(8,128)}"."""
        _, brace, rest = self.type_text.partition("{")
        return brace + rest


@dataclass(frozen=True)
class BufferAllocation:
    """A range of memory that is allocated for the whole program.

    Attributes:
        color: Number of its memory space: 0 HBM, 1 VMEM, 5 pinned host.
        parameter: Number of the argument it contains, if any.
        is_temporary: Whether it is the heap that temporaries share.
        is_private: Whether it belongs to one computation, such as a reduction's.
        is_live_out: Whether it may contain a result of the program.
        is_output_table: Whether it only has the addresses of several results.
    """

    number: int
    size_bytes: int
    color: int
    parameter: int | None
    is_temporary: bool
    is_private: bool
    is_live_out: bool
    is_output_table: bool
    values: tuple[Value, ...]


def parse_assignment(text: str) -> tuple[BufferAllocation, ...]:
    """Read a buffer-assignment listing.

    Raises:
        XLACompilationError: The text is not a buffer assignment.
    """
    heads: list[re.Match[str]] = []
    values: list[list[Value]] = []
    for line in text.splitlines():
        if head := _ALLOCATION.fullmatch(line):
            heads.append(head)
            values.append([])
        elif (found := _VALUE.fullmatch(line)) and values:
            name, index, phi, size, offset, type_text = found.groups()
            values[-1].append(
                Value(name, index or "{}", bool(phi), int(size), int(offset), type_text)
            )
    if not heads:
        raise XLACompilationError(
            "the compiler's buffer assignment holds no allocation this reader knows; "
            "it may come from another libtpu than the one jax pins."
        )
    return tuple(_allocation(head, inside) for head, inside in zip(heads, values, strict=True))


def _allocation(head: re.Match[str], values: list[Value]) -> BufferAllocation:
    about = head[3]
    color, parameter = _COLOR.search(about), _PARAMETER.search(about)
    return BufferAllocation(
        number=int(head[1]),
        size_bytes=int(head[2]),
        color=int(color[1]) if color else HBM,
        parameter=int(parameter[1]) if parameter else None,
        is_temporary="preallocated-temp" in about,
        is_private=", thread-local" in about or ", constant" in about,
        is_live_out="maybe-live-out" in about,
        is_output_table="output shape is |(" in about,
        values=tuple(values),
    )


def move_to_host(
    allocations: tuple[BufferAllocation, ...], host_instructions: Collection[str]
) -> tuple[BufferAllocation, ...]:
    """Return the allocations, with those used only by host computations marked as host memory.

    The compiler lists such allocations like those of HBM, and the total of its report counts them,
    but its test of whether a program fits does not.

    Args:
        allocations: The listed allocations.
        host_instructions: Names of the instructions that run on the host.
    """

    def is_of_host(allocation: BufferAllocation) -> bool:
        names = [value.instruction for value in allocation.values]
        return (
            allocation.is_private
            and bool(names)
            and all(name in host_instructions for name in names)
        )

    return tuple(
        replace(allocation, color=HOST) if is_of_host(allocation) else allocation
        for allocation in allocations
    )


def total_bytes(allocations: tuple[BufferAllocation, ...], color: int = HBM) -> int:
    """Return the bytes of all allocations in one memory; for HBM, the figure the compiler tests."""
    return sum(allocation.size_bytes for allocation in allocations if allocation.color == color)


_POSITION = re.compile(r"    (\d+):(\S+)")
_RANGE = re.compile(r"    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)")


@dataclass(frozen=True)
class Schedule:
    """The whole program in one flat order, with loop bodies in place, and each value's live range.

    Attributes:
        instructions: Names in the order in which they are issued.
        ranges: First and last position of each value, by its key.
    """

    instructions: tuple[str, ...]
    ranges: dict[str, tuple[int, int]]

    @cached_property
    def position(self) -> dict[str, int]:
        """Position of each instruction."""
        return {name: index for index, name in enumerate(self.instructions)}


@dataclass(frozen=True)
class Tenancy:
    """Values that follow each other at one address without a gap: one buffer of the heap.

    In-place updates and values that a loop passes on share an address, so their live ranges touch.
    """

    offset: int
    size_bytes: int
    start: int
    end: int
    values: tuple[Value, ...]


def parse_live_ranges(text: str) -> Schedule:
    """Parse a live-range listing; an empty or foreign text gives an empty schedule."""
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
    """Return the buffers of a heap with their live ranges; values without a range are left out.

    Values are joined if they have the same address and overlapping live ranges.
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
    """Return the bytes of the heap in use at each position of the schedule."""
    change = [0] * (length + 2)
    for tenancy in tenancies:
        change[tenancy.start] += tenancy.size_bytes
        change[tenancy.end + 1] -= tenancy.size_bytes
    use: list[int] = []
    level = 0
    for step in change[: length + 1]:
        level += step
        use.append(level)
    return use
