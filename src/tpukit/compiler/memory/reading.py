"""From the compiler's listings to a `MemoryReport`."""

from collections import Counter
from collections.abc import Sequence

from ...errors import XLACompilationError
from ...hardware import Slice
from ..dump import Listings
from ..hlo import HloModule, Shape, parse_hlo
from ..hlo.shape import HBM, HOST, reads_program
from ..program.lowered import ProgramFacts
from .assignment import BufferAllocation, Value, move_to_host, parse_assignment, total_bytes
from .attribution import (
    CATEGORIES,
    Attributor,
    argument_categories,
)
from .findings import find_waste
from .liveness import Schedule, Tenancy, find_tenancies, heap_use, parse_live_ranges
from .provenance import Provenance
from .report import OFFLOADED_COMPUTATION, Buffer, MemoryReport, Peak
from .sources import SourceTable, parse_sources

BUFFERS_KEPT = 64
CURVE_POINTS = 400


@reads_program
def read_memory(
    listings: Listings,
    *,
    facts: ProgramFacts,
    target: Slice,
    fits: bool,
    module: HloModule | None = None,
    source_lines: bool = True,
) -> MemoryReport:
    """Trace every allocation to what it is for.

    Args:
        listings: What the compiler wrote.
        facts: Names and layout of the program's arguments.
        target: The slice it was compiled for.
        fits: Whether the compiler accepted it.
        module: The program of the listings, where it has been read already.
        source_lines: Whether the program's line numbers are still those of the source.

    Raises:
        XLACompilationError: The listings do not agree with each other.
    """
    module = module or parse_hlo(listings.hlo)
    allocations = move_to_host(parse_assignment(listings.assignment), _host_instructions(module))
    schedule = parse_live_ranges(listings.live_ranges)
    sources = parse_sources(listings.hlo) if source_lines else SourceTable({})
    provenance = Provenance(module, argument_categories(facts))
    attributor = Attributor(module, schedule, provenance)
    heaps = [_Heap.of(one, schedule) for one in allocations if one.is_temporary]
    hbm_heaps = [heap for heap in heaps if heap.allocation.color == HBM]
    fixed = total_bytes(allocations) - sum(heap.allocation.size_bytes for heap in hbm_heaps)
    use = [sum(levels) for levels in zip(*(heap.use for heap in hbm_heaps), strict=True)]
    moment = max(range(len(use)), key=use.__getitem__) if use else 0
    writer = _BufferWriter(facts, attributor, sources, moment)
    arguments = [one for one in allocations if one.parameter is not None and one.color == HBM]
    fresh = [
        one for one in allocations if one.is_live_out and one.parameter is None and one.color == HBM
    ]
    of_host = [one for one in allocations if one.is_private and one.color == HOST]
    buffers = [
        *(writer.argument(one) for one in allocations if one.parameter is not None),
        *(writer.result(one) for one in fresh if not one.is_output_table),
        *(
            writer.temporary(tenancy, heap.allocation)
            for heap in heaps
            if heap.allocation.color in (HBM, HOST)
            for tenancy in heap.tenancies
        ),
        *(writer.offloaded_computation(one) for one in of_host),
    ]
    purposes = _purposes(allocations, buffers, hbm_heaps, moment)
    if sum(purposes.values()) != total_bytes(allocations):
        raise XLACompilationError(
            "the compiler's listings do not add up to its own total; they may be cut short, so "
            "compile again with use_cache=False."
        )
    usable = target.chip.hbm_usable_bytes.value
    return MemoryReport(
        program=facts.name,
        slice=target,
        fits=fits,
        total_bytes=total_bytes(allocations),
        usable_bytes=None if usable is None else int(usable // target.chip.devices_per_chip),
        host_bytes=total_bytes(allocations, HOST),
        host_computation_bytes=sum(one.size_bytes for one in of_host),
        argument_bytes=sum(one.size_bytes for one in arguments),
        temp_bytes=sum(heap.allocation.size_bytes for heap in hbm_heaps),
        result_bytes=sum(one.size_bytes for one in fresh),
        alias_bytes=sum(one.size_bytes for one in arguments if one.is_live_out),
        purposes=purposes,
        buffers=tuple(sorted(buffers, key=lambda one: -one.size_bytes)[:BUFFERS_KEPT]),
        peak=writer.peak() if use else None,
        curve=_curve(use, fixed),
        schedule_length=len(schedule.instructions),
        findings=find_waste(allocations, facts),
    )


def _host_instructions(module: HloModule) -> set[str]:
    computations = module.computations.values()
    return {one.name for inside in computations if inside.runs_on_host for one in inside}


class _Heap:
    """A heap with the buffers that share it."""

    def __init__(
        self, allocation: BufferAllocation, tenancies: list[Tenancy], use: list[int]
    ) -> None:
        self.allocation, self.tenancies, self.use = allocation, tenancies, use

    @classmethod
    def of(cls, allocation: BufferAllocation, schedule: Schedule) -> "_Heap":
        tenancies = find_tenancies(allocation, schedule)
        length = max((one.end for one in tenancies), default=0)
        return cls(
            allocation, tenancies, heap_use(tenancies, max(length, len(schedule.instructions)))
        )


class _BufferWriter:
    """Writes each stretch of memory down as a `Buffer`."""

    def __init__(
        self, facts: ProgramFacts, attributor: Attributor, sources: SourceTable, moment: int
    ) -> None:
        self.facts, self.attributor, self.sources, self.moment = facts, attributor, sources, moment
        self.categories = argument_categories(facts)

    def argument(self, one: BufferAllocation) -> Buffer:
        names = self.facts.argument_names
        known = one.parameter is not None and one.parameter < len(names)
        name = names[one.parameter or 0] if known else f"argument {one.parameter}"
        purpose = self.categories[one.parameter or 0] if known else "arguments"
        # What a loop writes over parts of an argument lies in its memory too: the whole is it.
        value = max(one.values, key=lambda value: value.size_bytes)
        return self._buffer(purpose, value, one.size_bytes, one.color, name, None, True)

    def result(self, one: BufferAllocation) -> Buffer:
        value = one.values[-1]
        return self._buffer(
            "results", value, one.size_bytes, one.color, *self._origin(value), at_peak=True
        )

    def offloaded_computation(self, one: BufferAllocation) -> Buffer:
        value = one.values[-1]
        where = self._origin(value)
        return self._buffer(
            OFFLOADED_COMPUTATION, value, one.size_bytes, one.color, *where, at_peak=False
        )

    def temporary(self, tenancy: Tenancy, heap: BufferAllocation) -> Buffer:
        alive = tenancy.start <= self.moment <= tenancy.end
        when = self.moment if alive else tenancy.end
        value = self.attributor.speaker(tenancy, when)
        purpose = self.attributor.category(tenancy, when)
        if heap.color == HOST and purpose == "unattributed":
            purpose = "offloaded"  # whatever it is, that is why it lies on the host
        return self._buffer(
            purpose, value, tenancy.size_bytes, heap.color, *self._origin(value), at_peak=alive
        )

    def peak(self) -> Peak:
        order = self.attributor.schedule.instructions
        name = order[min(self.moment, len(order) - 1)]
        found = self.attributor.instructions.get(name)
        op_name = short_op_name(found.op_name) if found else ""
        source = self.sources.line_of(found.stack_frame) if found else None
        return Peak(self.moment, name, op_name, source)

    def _origin(self, value: Value) -> tuple[str, str | None]:
        found = self.attributor.maker(value)
        if found is None:
            return value.instruction, None
        name = short_op_name(found.op_name) or value.instruction
        return name, self.sources.line_of(found.stack_frame)

    def _buffer(
        self,
        purpose: str,
        value: Value,
        size_bytes: int,
        color: int,
        name: str,
        source: str | None,
        at_peak: bool,
    ) -> Buffer:
        shape: Shape | None = value.shape
        padding = max(0, size_bytes - shape.bytes) if shape is not None else 0
        return Buffer(
            purpose=purpose,
            shape=str(shape) if shape is not None else "tuple",
            layout=value.layout_text if shape is not None else "",
            size_bytes=size_bytes,
            padding_bytes=padding,
            space="host" if color == HOST else "HBM",
            name=name,
            source=source,
            at_peak=at_peak,
        )


def short_op_name(op_name: str) -> str:
    """The name without the frames that every program of ours starts with."""
    parts = op_name.split("/")
    while len(parts) > 1 and (parts[0].startswith("jit(") or parts[0] == "call_exported"):
        parts.pop(0)
    return "/".join(parts)


def _purposes(
    allocations: Sequence[BufferAllocation], buffers: list[Buffer], heaps: list[_Heap], moment: int
) -> dict[str, int]:
    """Bytes by purpose at the fullest moment; padding and gaps are purposes of their own."""
    amounts: Counter[str] = Counter()
    for one in buffers:
        if one.space == "HBM" and one.at_peak:
            amounts[one.purpose] += one.size_bytes - one.padding_bytes
            amounts["padding"] += one.padding_bytes
    for heap in heaps:
        amounts["gaps"] += heap.allocation.size_bytes - heap.use[moment]
    spoken_for = sum(amounts.values())
    amounts["constants and stack"] = total_bytes(tuple(allocations)) - spoken_for
    return {name: amounts[name] for name in CATEGORIES if amounts[name]}


def _curve(use: list[int], fixed: int) -> tuple[tuple[int, int], ...]:
    """At most `CURVE_POINTS` points, each the highest of its stretch."""
    stretch = max(1, -(-len(use) // CURVE_POINTS))
    points: list[tuple[int, int]] = []
    for start in range(0, len(use), stretch):
        best = max(range(start, min(start + stretch, len(use))), key=use.__getitem__)
        points.append((best, use[best] + fixed))
    return tuple(points)
