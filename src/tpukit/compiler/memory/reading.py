"""Build a `MemoryReport` from the compiler's listings."""

from collections import Counter
from collections.abc import Sequence
from math import prod

from ...errors import XLACompilationError
from ...hardware import Slice
from ..dump import Listings
from ..hlo import HloModule, Shape, parse_hlo
from ..hlo.shape import HBM, HOST, reads_program
from ..program.lowered import ProgramFacts
from .assignment import (
    BufferAllocation,
    Schedule,
    Tenancy,
    Value,
    find_tenancies,
    heap_use,
    move_to_host,
    parse_assignment,
    parse_live_ranges,
    total_bytes,
)
from .attribution import (
    CATEGORIES,
    Attributor,
    Provenance,
    argument_categories,
)
from .sources import SourceTable, parse_sources
from .view import OFFLOADED_COMPUTATION, ArgumentFinding, Buffer, MemoryReport, Peak

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
    """Find the purpose of every allocation and return the report.

    Args:
        listings: The compiler's listings.
        facts: Names and layout of the program's arguments.
        target: The slice it was compiled for.
        fits: Whether the compiler accepted it.
        module: The parsed program of the listings, if available.
        source_lines: Whether the program's line numbers are valid for the current source.

    Raises:
        XLACompilationError: The listings contradict each other.
    """
    module = module or parse_hlo(listings.hlo)
    allocations = move_to_host(parse_assignment(listings.assignment), _host_instructions(module))
    schedule = parse_live_ranges(listings.live_ranges)
    sources = parse_sources(listings.hlo) if source_lines else SourceTable({})
    provenance = Provenance(module, argument_categories(facts))
    attributor = Attributor(module, schedule, provenance)
    heaps = [
        _Heap.of(allocation, schedule) for allocation in allocations if allocation.is_temporary
    ]
    hbm_heaps = [heap for heap in heaps if heap.allocation.color == HBM]
    fixed = total_bytes(allocations) - sum(heap.allocation.size_bytes for heap in hbm_heaps)
    use = [sum(levels) for levels in zip(*(heap.use for heap in hbm_heaps), strict=True)]
    moment = max(range(len(use)), key=use.__getitem__) if use else 0
    writer = _BufferWriter(facts, attributor, sources, moment)
    arguments = [
        allocation
        for allocation in allocations
        if allocation.parameter is not None and allocation.color == HBM
    ]
    fresh = [
        allocation
        for allocation in allocations
        if allocation.is_live_out and allocation.parameter is None and allocation.color == HBM
    ]
    of_host = [
        allocation
        for allocation in allocations
        if allocation.is_private and allocation.color == HOST
    ]
    buffers = [
        *(
            writer.argument(allocation)
            for allocation in allocations
            if allocation.parameter is not None
        ),
        *(writer.result(allocation) for allocation in fresh if not allocation.is_output_table),
        *(
            writer.temporary(tenancy, heap.allocation)
            for heap in heaps
            if heap.allocation.color in (HBM, HOST)
            for tenancy in heap.tenancies
        ),
        *(writer.offloaded_computation(allocation) for allocation in of_host),
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
        host_computation_bytes=sum(allocation.size_bytes for allocation in of_host),
        argument_bytes=sum(allocation.size_bytes for allocation in arguments),
        temp_bytes=sum(heap.allocation.size_bytes for heap in hbm_heaps),
        result_bytes=sum(allocation.size_bytes for allocation in fresh),
        alias_bytes=sum(
            allocation.size_bytes for allocation in arguments if allocation.is_live_out
        ),
        purposes=purposes,
        buffers=tuple(
            sorted(buffers, key=lambda allocation: -allocation.size_bytes)[:BUFFERS_KEPT]
        ),
        peak=writer.peak() if use else None,
        curve=_curve(use, fixed),
        schedule_length=len(schedule.instructions),
        findings=find_waste(allocations, facts),
    )


def _host_instructions(module: HloModule) -> set[str]:
    computations = module.computations.values()
    return {
        instruction.name for inside in computations if inside.runs_on_host for instruction in inside
    }


class _Heap:
    """A heap with the buffers that share it."""

    def __init__(
        self, allocation: BufferAllocation, tenancies: list[Tenancy], use: list[int]
    ) -> None:
        self.allocation, self.tenancies, self.use = allocation, tenancies, use

    @classmethod
    def of(cls, allocation: BufferAllocation, schedule: Schedule) -> "_Heap":
        tenancies = find_tenancies(allocation, schedule)
        length = max((tenancy.end for tenancy in tenancies), default=0)
        return cls(
            allocation, tenancies, heap_use(tenancies, max(length, len(schedule.instructions)))
        )


class _BufferWriter:
    """Turns allocations into `Buffer`s."""

    def __init__(
        self, facts: ProgramFacts, attributor: Attributor, sources: SourceTable, moment: int
    ) -> None:
        self.facts, self.attributor, self.sources, self.moment = facts, attributor, sources, moment
        self.categories = argument_categories(facts)

    def argument(self, allocation: BufferAllocation) -> Buffer:
        names = self.facts.argument_names
        known = allocation.parameter is not None and allocation.parameter < len(names)
        name = names[allocation.parameter or 0] if known else f"argument {allocation.parameter}"
        purpose = self.categories[allocation.parameter or 0] if known else "arguments"
        # What a loop writes over parts of an argument lies in its memory too: the whole is it.
        value = max(allocation.values, key=lambda value: value.size_bytes)
        return self._buffer(
            purpose, value, allocation.size_bytes, allocation.color, name, None, True
        )

    def result(self, allocation: BufferAllocation) -> Buffer:
        value = allocation.values[-1]
        return self._buffer(
            "results",
            value,
            allocation.size_bytes,
            allocation.color,
            *self._origin(value),
            at_peak=True,
        )

    def offloaded_computation(self, allocation: BufferAllocation) -> Buffer:
        value = allocation.values[-1]
        where = self._origin(value)
        return self._buffer(
            OFFLOADED_COMPUTATION,
            value,
            allocation.size_bytes,
            allocation.color,
            *where,
            at_peak=False,
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
    """Return an operation name without the frames that every tpukit program starts with."""
    parts = op_name.split("/")
    while len(parts) > 1 and (parts[0].startswith("jit(") or parts[0] == "call_exported"):
        parts.pop(0)
    return "/".join(parts)


def _purposes(
    allocations: Sequence[BufferAllocation], buffers: list[Buffer], heaps: list[_Heap], moment: int
) -> dict[str, int]:
    """Return the bytes by purpose at the peak; padding and gaps are purposes of their own."""
    amounts: Counter[str] = Counter()
    for buffer in buffers:
        if buffer.space == "HBM" and buffer.at_peak:
            amounts[buffer.purpose] += buffer.size_bytes - buffer.padding_bytes
            amounts["padding"] += buffer.padding_bytes
    for heap in heaps:
        amounts["gaps"] += heap.allocation.size_bytes - heap.use[moment]
    spoken_for = sum(amounts.values())
    amounts["constants and stack"] = total_bytes(tuple(allocations)) - spoken_for
    return {name: amounts[name] for name in CATEGORIES if amounts[name]}


def _curve(use: list[int], fixed: int) -> tuple[tuple[int, int], ...]:
    """Return at most `CURVE_POINTS` points, each the maximum of its interval."""
    stretch = max(1, -(-len(use) // CURVE_POINTS))
    points: list[tuple[int, int]] = []
    for start in range(0, len(use), stretch):
        best = max(range(start, min(start + stretch, len(use))), key=use.__getitem__)
        points.append((best, use[best] + fixed))
    return tuple(points)


# Below this share of what the arguments take, a finding is noise.
_LARGE_SHARE = 0.01
_LARGE_BYTES = 2**20


def find_waste(
    allocations: Sequence[BufferAllocation], facts: ProgramFacts
) -> tuple[ArgumentFinding, ...]:
    """Find arguments that should be donated and large replicated ones, the costliest first."""
    arguments = [
        finding
        for finding in allocations
        if finding.parameter is not None and finding.parameter < len(facts.argument_names)
    ]
    arguments = [finding for finding in arguments if finding.color == HBM]
    least = max(_LARGE_BYTES, _LARGE_SHARE * sum(finding.size_bytes for finding in arguments))
    found = [
        *_not_donated(allocations, arguments, facts, least),
        *_replicated(arguments, facts, least),
    ]
    return tuple(sorted(found, key=lambda finding: -finding.size_bytes))


def _not_donated(
    allocations: Sequence[BufferAllocation],
    arguments: Sequence[BufferAllocation],
    facts: ProgramFacts,
    least: float,
) -> list[ArgumentFinding]:
    results = Counter(
        str(allocation.values[-1].shape)
        for allocation in allocations
        if allocation.is_live_out
        and allocation.parameter is None
        and not allocation.is_output_table
        and allocation.values
    )
    found: list[ArgumentFinding] = []
    for allocation in arguments:
        shape = str(allocation.values[0].shape) if allocation.values else ""
        number = allocation.parameter or 0
        if number in facts.donated or allocation.size_bytes < least or not results[shape]:
            continue
        results[shape] -= 1
        name = facts.argument_names[number]
        found.append(
            ArgumentFinding(
                kind="not donated",
                what=f"{name} {shape}",
                size_bytes=allocation.size_bytes,
                advice=f"a result has the same shape and could reuse it; donate {name}.",
            )
        )
    return found


def _replicated(
    arguments: Sequence[BufferAllocation], facts: ProgramFacts, least: float
) -> list[ArgumentFinding]:
    devices = prod(size for _, size in facts.mesh_axes)
    found: list[ArgumentFinding] = []
    for allocation in arguments:
        number = allocation.parameter or 0
        if (
            devices > 1
            and facts.argument_copies[number] == devices
            and allocation.size_bytes >= least
        ):
            name = facts.argument_names[number]
            shape = allocation.values[0].shape if allocation.values else ""
            found.append(
                ArgumentFinding(
                    kind="replicated",
                    what=f"{name} {shape}",
                    size_bytes=allocation.size_bytes,
                    advice=f"all {devices} devices hold the whole of it; split it over an axis.",
                )
            )
    return found
