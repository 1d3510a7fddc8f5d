"""A reader for the compiler's buffer assignment: every allocation and the values that lie in it."""

import re
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
        instruction: What computes it.
        index: Which leaf of the instruction's result it is, e.g. "{}" or "{1}".
        is_phi: Whether it only stands for another value where control flow meets.
    """

    instruction: str
    index: str
    is_phi: bool
    size_bytes: int
    offset: int
    type_text: str

    @property
    def key(self) -> str:
        """The name in the list of live ranges."""
        return self.instruction + self.index

    @cached_property
    def shape(self) -> Shape | None:
        """The array it holds, or None for a tuple's table of addresses."""
        if self.type_text.startswith("("):
            return None
        found = parse_shapes(self.type_text)
        return found[0] if len(found) == 1 else None

    @property
    def layout_text(self) -> str:
        """How it lies in memory, as the compiler writes it, e.g. "{1,0:T(8,128)}"."""
        _, brace, rest = self.type_text.partition("{")
        return brace + rest


@dataclass(frozen=True)
class BufferAllocation:
    """A stretch of memory that lives as long as the program.

    Attributes:
        color: The memory it is in, numbered as memory spaces are: 0 HBM, 1 VMEM, 5 pinned host.
        parameter: Number of the argument it holds, if it holds one.
        is_temporary: Whether it is the heap that temporaries share.
        is_private: Whether it belongs to one computation, such as a reduction's, by itself.
        is_live_out: Whether a result of the program may lie in it.
        is_output_table: Whether it only lists where several results lie.
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
        XLACompilationError: It is not one.
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
    """The same allocations with those that only the host computes in counted as host memory.

    The compiler lists them like those of HBM, and the total of its report counts them; its test
    of whether a program fits does not.

    Args:
        allocations: As listed.
        host_instructions: Names of the instructions that run on the host.
    """

    def is_of_host(one: BufferAllocation) -> bool:
        names = [value.instruction for value in one.values]
        return one.is_private and bool(names) and all(name in host_instructions for name in names)

    return tuple(replace(one, color=HOST) if is_of_host(one) else one for one in allocations)


def total_bytes(allocations: tuple[BufferAllocation, ...], color: int = HBM) -> int:
    """All allocations of one memory together: for HBM, the figure the compiler tests."""
    return sum(one.size_bytes for one in allocations if one.color == color)
