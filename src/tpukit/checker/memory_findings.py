"""Find arrays of a captured step that are larger, or on more devices, than needed."""

import re
from collections import defaultdict
from collections.abc import Iterable

from ..capturing.captured import CapturedProgram
from ..compiler.compiled import CompiledStep
from ..compiler.hlo import Computation, HloModule, find_collective, trip_count
from ..compiler.timeline import Machine, Network
from ..hardware.figure import bytes_text, count_text
from .program_finding import ProgramFinding, StepTimes, place_in_program, some_names
from .report.collectives import collective_rows

_LARGE_BYTES = 2**20
_LARGE_SHARE = 0.01
_LARGE_OF_HBM = 0.05
_ALIASED = re.compile(r"\{[\d, ]*\}: \((\d+),")
_DIMENSIONS = re.compile(r"\[([\d,]*)\]")


def find_in_memory(
    program: CapturedProgram, compiled: CompiledStep, times: StepTimes | None
) -> Iterable[ProgramFinding]:
    """Yield donations without effect, replicated state, and arrays gathered as a whole."""
    yield from _not_reused(program, compiled)
    yield from _replicated_state(program, compiled)
    yield from _whole_gathers(program, compiled, times)


def _not_reused(program: CapturedProgram, compiled: CompiledStep) -> Iterable[ProgramFinding]:
    """Yield donated state whose memory no result reuses; donated batches do not count."""
    facts = program.program.facts
    changed = {one["argument"] for one in program.evidence.get("changes", ())}
    batch = {
        number
        for number, purpose in enumerate(facts.argument_purposes)
        if purpose == "batch inputs" and facts.argument_names[number] not in changed
    }
    _, listed, aliases = compiled.module.header.partition("input_output_alias=")
    reused = {int(number) for number in _ALIASED.findall(aliases)} if listed else set[int]()
    sizes = {
        number: program.bytes_on_device(number)
        for number in facts.donated
        if number not in reused | batch and number < len(facts.argument_bytes)
    }
    whole = sum(facts.argument_bytes) / program.devices
    lost = {n: size for n, size in sizes.items() if size > max(_LARGE_BYTES, _LARGE_SHARE * whole)}
    if not lost:
        return
    largest = sorted(lost, key=lambda number: -lost[number])
    names = [f"{facts.argument_names[n]} {program.argument_types[n]}" for n in largest]
    yield ProgramFinding(
        "donation not used",
        f"no result takes the place of {count_text(len(lost), 'donated argument')} "
        f"({some_names(names)})",
        None,
        "return an array of the same shape, type and sharding, or leave the donation out",
        size_bytes=sum(lost.values()),
    )


def _replicated_state(program: CapturedProgram, compiled: CompiledStep) -> Iterable[ProgramFinding]:
    """Yield optimizer state that several devices store in common."""
    facts, devices = program.program.facts, program.devices
    kept: dict[int, tuple[int, int]] = {}
    for number, purpose in enumerate(facts.argument_purposes):
        copies = facts.argument_copies[number]
        size = program.bytes_on_device(number)
        if purpose == "optimizer state" and copies > 1 and size > _LARGE_BYTES:
            kept[number] = size, copies
    size = sum(size for size, _ in kept.values())
    if devices == 1 or size < _LARGE_SHARE * compiled.memory.argument_bytes:
        return
    needless = sum(size * (1 - 1 / copies) for size, copies in kept.values())
    largest = sorted(kept, key=lambda number: -kept[number][0])
    names = [f"{facts.argument_names[number]}" for number in largest]
    most = kept[largest[0]][1]
    machine = Machine.of(compiled.slice)
    yield ProgramFinding(
        "replicated optimizer state",
        f"{some_names(names)}: {most} of {devices} devices keep the same part, "
        f"{bytes_text(size)} on each",
        machine.hbm_s(2 * needless),  # read and written by each update
        "shard it over the data axis, too (ZeRO): each device then updates its own part",
        size_bytes=round(needless),
    )


def _whole_gathers(
    program: CapturedProgram, compiled: CompiledStep, times: StepTimes | None
) -> Iterable[ProgramFinding]:
    """Yield all-gathers outside loops whose result is larger than one layer needs.

    Such a result is a parameter of all layers, optimizer state, or a large share of HBM.
    """
    if times is None:
        return
    module, usable = compiled.module, compiled.memory.usable_bytes or 0
    lengths = _loop_lengths(module)
    layered, state = _sizes(program, lengths)
    entry = module.entry
    chosen: dict[str, str] = {}
    for instruction in entry:
        found = None
        if instruction.opcode not in ("while", "conditional", "call"):
            found = find_collective(instruction, entry, module)
        if found is None or found.kind != "all-gather" or found.bytes < _LARGE_BYTES:
            continue
        elements = max(shape.elements for shape in instruction.shapes)
        if elements in layered:
            chosen[instruction.name] = f"{layered[elements]} with all of its layers"
        elif elements in state:
            chosen[instruction.name] = f"{state[elements]}, which only the optimizer needs"
        elif usable and found.bytes > _LARGE_OF_HBM * usable:
            chosen[instruction.name] = "an array"
    network = Network(
        Machine.of(compiled.slice), tuple(compiled.coordinates), tuple(compiled.slice_of_device)
    )
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in chosen.items():
        by_reason[reason].append(name)
    for reason, names in by_reason.items():
        # The wait for a gather has another name than its start, so the other gathers are left out
        # instead.
        others = set(chosen) - set(names)
        spans = [
            span
            for span in times.prediction.spans
            if span.name in entry.by_name and span.name not in others
        ]
        sizes = {_gathered(name, entry, module) for name in names}
        rows = [
            row
            for row in collective_rows(module, spans, network)
            if row["kind"] == "all-gather" and row["bytes"] in sizes
        ]
        if not rows:
            continue
        where = place_in_program(rows[0]["op_name"])
        yield ProgramFinding(
            "whole all-gather",
            f"{len(names)} × {reason}, {bytes_text(max(sizes))}, is gathered outside of a loop "
            f"at {where}",
            sum(row["exposed_s"] for row in rows),
            "gather one layer at a time inside the scan, or constrain its sharding where it is "
            "used",
            size_bytes=max(sizes),
        )


def _gathered(name: str, computation: Computation, module: HloModule) -> int:
    found = find_collective(computation.by_name[name], computation, module)
    return 0 if found is None else found.bytes


def _loop_lengths(module: HloModule) -> set[int]:
    found: set[int] = set()
    for computation in module.computations.values():
        for one in computation:
            if one.opcode == "while":
                found.add(trip_count(one, computation, module) or 0)
    return found - {0, 1}


def _sizes(program: CapturedProgram, lengths: set[int]) -> tuple[dict[int, str], dict[int, str]]:
    """Return names by number of elements: stacked parameters, and optimizer state."""
    facts = program.program.facts
    layered: dict[int, str] = {}
    state: dict[int, str] = {}
    weights: set[int] = set()
    for number, purpose in enumerate(facts.argument_purposes):
        text = _DIMENSIONS.search(program.argument_types[number])
        dims = [int(size) for size in text[1].split(",") if size] if text else []
        elements = 1
        for size in dims:
            elements *= size
        if purpose == "parameters":
            weights.add(elements)
            if len(dims) > 2 and dims[0] in lengths:
                layered.setdefault(elements, facts.argument_names[number])
        elif purpose == "optimizer state":
            state.setdefault(elements, facts.argument_names[number])
    return layered, {size: name for size, name in state.items() if size not in weights}
