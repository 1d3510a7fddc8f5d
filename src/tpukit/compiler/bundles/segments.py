"""Split a kernel's program at its branches and turn each segment into a Python function.

A segment runs from a branch target to the last delay slot of the next branch. Its function computes
the scalars, loads and stores scalar memory, and reports transfers. Vector instructions take time
but decide nothing about the control flow.
"""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...errors import XLACompilationError
from .listing import NEVER, InstructionBundle, InstructionListing, SlotInstruction
from .scalar import (
    NAMESPACE,
    address_source,
    expression,
    operand_address,
    value_source,
)
from .units import Core, OpcodeReading, read_opcode

_TAKES_ENGINE = ("product", "weights", "lanes", "permute", "transpose")


@dataclass(frozen=True)
class Stretch:
    """The timing of a straight-line run of bundles.

    Attributes:
        issue_cycles: Issue cycle of each bundle; the first is 0.
        cycles: Cycles from its first bundle to the bundle after it.
        busy: Used slots per unit; for MXU and XLU the busy cycles of the engines.
        waits: Waiting cycles by cause.
        product_cycles: Cycles of the matmuls alone, over all matrix units.
    """

    issue_cycles: tuple[int, ...]
    cycles: int
    busy: Counter[str]
    waits: Counter[str]
    product_cycles: int


class _Queues:
    """The result queues of the matrix units and the transposers."""

    def __init__(self, bundles: Sequence[InstructionBundle]) -> None:
        rows: Counter[str] = Counter()
        pops: Counter[str] = Counter()
        for bundle in bundles:
            for instruction in bundle.instructions:
                reading = read_opcode(instruction.opcode)
                if reading.buffer is None:
                    rows[reading.engine] += _rows(reading) if _starts(reading) else 0
                    pops[reading.engine] += reading.kind in ("result", "transposed")
        self._rows_per_pop = {
            engine: rows[engine] / pops[engine] for engine in pops if pops[engine]
        }
        self._queued: defaultdict[str, deque[tuple[float, int]]] = defaultdict(deque)
        self._rows_in: Counter[str] = Counter()
        self._popped: Counter[str] = Counter()
        self._buffers: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._last_pop: dict[str, int] = {}

    def put(self, reading: OpcodeReading, at: int) -> None:
        """Add a matmul or transposition whose first result is ready at `at`."""
        if reading.buffer is not None:
            self._buffers[reading.engine][reading.buffer] = at
        else:
            self._rows_in[reading.engine] += _rows(reading)
            self._queued[reading.engine].append((self._rows_in[reading.engine], at))

    def take(self, reading: OpcodeReading, now: int, spacing: int) -> int:
        """Remove the next result, and return when it is ready."""
        engine = reading.engine
        if reading.buffer is not None:
            # A product fills the entries from the one it names up to the next product's.
            entries = self._buffers[engine]
            first = max((entry for entry in entries if entry <= reading.buffer), default=None)
            return 0 if first is None else entries[first]
        self._popped[engine] += 1
        needed = self._popped[engine] * self._rows_per_pop[engine] - 1e-6
        queue = self._queued[engine]
        while len(queue) > 1 and queue[0][0] < needed:
            queue.popleft()
        ready = queue[0][1] if queue else 0
        if reading.kind == "result":
            return ready
        ready = max(ready, now, self._last_pop.get(engine, -spacing) + spacing)
        self._last_pop[engine] = ready
        return ready


def _starts(reading: OpcodeReading) -> bool:
    """Whether an instruction adds results to a queue."""
    return reading.kind == "product" or (reading.kind == "transpose" and reading.opens)


def _rows(reading: OpcodeReading) -> int:
    """Return the rows per matmul relative to 32-bit operands, because narrower ones are packed."""
    found = re.search(r"[1-9]\d*", reading.number_format)
    return max(1, 32 // int(found[0])) if found else 1


def time_stretch(bundles: Sequence[InstructionBundle], core: Core) -> Stretch:
    """Time a straight-line run of bundles on an idle core."""
    queues = _Queues(bundles)
    results: dict[str, int] = {}
    free: dict[str, int] = {}
    busy: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    issued: list[int] = []
    product_cycles = 0
    now = -1
    for bundle in bundles:
        now += 1
        planned, cause = now, ""
        for instruction in bundle.instructions:
            reading = read_opcode(instruction.opcode)
            for name in instruction.reads:
                if results.get(name, 0) > now:
                    now, cause = results[name], reading.unit
            if reading.kind in ("result", "transposed"):
                at = queues.take(reading, now, core.lane_spacing)
                if at > now:
                    now, cause = at, "MXU result" if reading.kind == "result" else "XLU result"
            elif reading.kind in _TAKES_ENGINE and free.get(core.engine(reading), 0) > now:
                now, cause = free[core.engine(reading)], f"{reading.unit} busy"
        if now > planned:
            waits[cause] += now - planned
        for instruction in bundle.instructions:
            reading = read_opcode(instruction.opcode)
            spacing = core.spacing(reading)
            beside = reading.kind == "weights" and core.weights_beside_products
            engine_cycles = reading.unit in ("MXU", "XLU") and not beside
            busy[reading.unit] += spacing if engine_cycles else 1
            product_cycles += spacing if reading.kind == "product" else 0
            if reading.kind == "special":
                busy["VALU"] += 1  # what feeds the special-function unit takes a vector slot
            if reading.kind in _TAKES_ENGINE:
                free[core.engine(reading)] = now + spacing
            done = now + core.result_cycles(reading)
            if _starts(reading):
                queues.put(reading, done)
            if instruction.target:
                results[instruction.target] = done
        issued.append(now)
    return Stretch(tuple(issued), now + 1, busy, waits, product_cycles)


_TARGET = re.compile(r"target = \$region(\d+)")
_MEMORY = re.compile(r"\[smem:\[(.*?)\]\]\s*,?\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"index: (\d+), kind: (\w+)")
_NAMES = re.compile(r"\b[sp]\d+_[sp]\d+\b")
_SCALAR = re.compile(r"[sp]\d+_([sp]\d+)$")
_NO_EFFECT = ("vsyncadd.remote", "vsyncpa", "vsyncset", "shalt", "sfence", "sphi", "sbr")


@dataclass(frozen=True)
class Segment:
    """A segment of the program.

    Attributes:
        end: Address of the bundle after it.
        run: Takes the values of names and the machine's memory and transfer handlers; returns
            whether the branch inside is taken, or None if there is no branch.
        branch_end: Address after the branch's delay slots; None without a branch.
        branch_target: Target address of the branch.
    """

    start: int
    end: int
    depth: int
    is_loop_body: bool
    stretch: Stretch
    run: Callable[..., Any]
    branch_end: int | None = None
    branch_target: int | None = None


@dataclass(frozen=True)
class _Branch:
    address: int
    end: int
    target: int


def cut_segments(listing: InstructionListing, core: Core) -> dict[int, Segment]:
    """Return every segment of a program, by its first address."""
    branches = list(_branches(listing, core))
    cuts = {0, len(listing.bundles)}
    for branch in branches:
        cuts.update((branch.end, branch.target))
    starts = sorted(cut for cut in cuts if cut <= len(listing.bundles))
    at = {branch.address: branch for branch in branches}
    ranges = list(pairwise(starts))
    names = _Names(listing, ranges)
    segments: dict[int, Segment] = {}
    for start, end in ranges:
        bundles = listing.bundles[start:end]
        inside = [at[address] for address in range(start, end) if address in at]
        if len(inside) > 1:
            raise XLACompilationError(
                f"two branches of a kernel share their delay slots at bundle {start:#x}, "
                "which is not followed; it cannot be timed."
            )
        stretch = time_stretch(bundles, core)
        writer = _Writer(names)
        for bundle, at_cycle in zip(bundles, stretch.issue_cycles, strict=True):
            for instruction in sorted(bundle.instructions, key=_order):
                writer.add(instruction, at_cycle)
        scope = dict(NAMESPACE)
        exec(compile(writer.source(), f"<bundles {start:#x}>", "exec"), scope)
        segments[start] = Segment(
            start,
            end,
            bundles[0].depth,
            bundles[0].label == "LB",
            stretch,
            scope["run"],
            inside[0].end if inside else None,
            inside[0].target if inside else None,
        )
    return segments


def _branches(listing: InstructionListing, core: Core) -> Iterator[_Branch]:
    for address, bundle in enumerate(listing.bundles):
        for instruction in bundle.instructions:
            if not instruction.opcode.startswith("sbr"):
                continue
            region = _TARGET.search(instruction.text)
            target = listing.region_starts.get(int(region[1])) if region else None
            if target is None and region and bundle.depth == 0:
                target = len(listing.bundles)  # a core, or a grid, that has nothing to do leaves
            slots = _delay_slots(listing, address, instruction, core)
            if target is None or address + slots >= len(listing.bundles):
                raise XLACompilationError(
                    f"the branch in bundle {address:#x} of a kernel goes nowhere in its listing; "
                    "it cannot be timed."
                )
            yield _Branch(address, address + 1 + slots, target)


def _delay_slots(
    listing: InstructionListing, address: int, branch: SlotInstruction, core: Core
) -> int:
    """Return how many bundles after a branch are issued even when it is taken.

    Older generations have a fixed number. TPU7x has up to six, which the listing does not state. If
    the skipped code begins with a region of its own that soon, the slots reach up to that region.
    They also end at a transfer whose values are computed only when the branch is not taken.
    Otherwise they reach at least to the last bundle that is guarded against the branch being taken,
    and on to the first instruction that must not run then (a transfer or a semaphore).
    """
    most = core.branch_delay_slots
    if not core.delay_slots_vary:
        return most
    following = listing.bundles[address + 1 : address + 1 + most]
    slots = 0
    only_without: set[str] = set()  # what is computed only when the branch is not taken
    for number, bundle in enumerate(following, start=1):
        guarded = [
            instruction
            for instruction in bundle.instructions
            if instruction.predicate == branch.predicate and instruction.negated != branch.negated
        ]
        if guarded:
            slots = number
            only_without.update(instruction.target for instruction in guarded)
    begins = (
        n
        for n, bundle in enumerate(following)
        if bundle.label
        or bundle.regions
        or any(_needs(instruction, only_without) for instruction in bundle.instructions)
    )
    region = next(begins, None)
    if region is not None:
        return max(slots, region)
    for bundle in following[slots:]:
        if any(map(_has_side_effect, bundle.instructions)):
            break
        slots += 1
    return slots


def _needs(instruction: SlotInstruction, names: set[str]) -> bool:
    """Whether an instruction is a transfer, or a wait for one, that needs one of these values."""
    return instruction.opcode.startswith("dma") and not names.isdisjoint(instruction.reads)


def _has_side_effect(instruction: SlotInstruction) -> bool:
    return instruction.opcode.startswith(("dma", "vsync", "vwait", "sbr", "sst"))


class _Names:
    """Values that leave the segment computing them, and the registers that phis read."""

    def __init__(self, listing: InstructionListing, ranges: Sequence[tuple[int, int]]) -> None:
        self.phi_registers: set[str] = set()
        read_in: defaultdict[str, set[int]] = defaultdict(set)
        made_in: dict[str, int] = {}
        for start, end in ranges:
            for bundle in listing.bundles[start:end]:
                for instruction in bundle.instructions:
                    for name in instruction.reads:
                        read_in[name].add(start)
                    if instruction.target:
                        made_in[instruction.target] = start
                    if instruction.opcode == "sphi":
                        register = _SCALAR.match(instruction.target)
                        self.phi_registers.update((register[1],) if register else ())
        self.leaving = {
            name for name, pieces in read_in.items() if pieces - {made_in.get(name, -1)}
        }


class _Writer:
    """Writes the Python source of one segment's `run`, instruction by instruction."""

    def __init__(self, names: _Names) -> None:
        self._names = names
        self._body: list[str] = []
        self._made: dict[str, None] = {}
        self._needed: dict[str, None] = {}

    def add(self, instruction: SlotInstruction, at: int) -> None:
        """Write the effect of an instruction that issues `at` cycles after the segment's start."""
        opcode = instruction.opcode
        if opcode == "sphi":
            self._phi(instruction)
        elif opcode.startswith("dma"):
            values = [value_source(operand) for operand in instruction.operands]
            self._do(f"{_transfer(instruction, values)}{at})")
        elif opcode == "sst":
            stored = _MEMORY.match(instruction.text)
            if stored:
                where, value = address_source(stored[1]), value_source(stored[2])
                self._do(f"store({_guard(instruction)},{where},{value})")
        elif opcode == "vsyncadd" and len(instruction.operands) == 2:
            flag, amount = map(value_source, instruction.operands)
            self._do(f"signal({_guard(instruction)},{flag},{amount},{at})")
        elif opcode.startswith("vwait"):
            self._do(f"meet({_guard(instruction)})")
        elif opcode.startswith("sbr"):
            self._do(f"taken = {_guard(instruction)}")
            self._made["taken"] = None
        elif not opcode.startswith(_NO_EFFECT):
            self._define(instruction, _value(instruction))

    def source(self) -> str:
        """Return the whole function: the values it reads, its effects, and its results."""
        shared = [
            name
            for name in self._made
            if name in self._names.leaving or name in self._names.phi_registers
        ]
        lines = [
            "def run(values, load, store, issue, wait, signal, meet, operand):",
            *(f"{name} = values.get({name!r}, UNKNOWN)" for name in self._needed),
            *self._body,
            *(f"values[{name!r}] = {name}" for name in shared),
            "return taken" if "taken" in self._made else "return None",
        ]
        return "\n ".join(lines)

    def _phi(self, instruction: SlotInstruction) -> None:
        """Return the value that a phi's register has on entry."""
        register = _SCALAR.match(instruction.target)
        if register is not None:
            self._need(register[1])
            self._body.append(f"{instruction.target} = {register[1]}")
            self._made[instruction.target] = None

    def _define(self, instruction: SlotInstruction, source: str) -> None:
        register = _SCALAR.match(instruction.target)
        if register is None:
            return
        followed = register[1] in self._names.phi_registers
        if instruction.predicate:
            kept = register[1] if followed else "UNKNOWN"
            otherwise = value_source(f"%{instruction.otherwise}") if instruction.otherwise else kept
            if otherwise == register[1]:
                self._need(otherwise)
            source = f"choose({_guard(instruction)},{source},{otherwise})"
        self._do(f"{instruction.target} = {source}", reads=source)
        self._made[instruction.target] = None
        if followed:
            self._body.append(f"{register[1]} = {instruction.target}")
            self._made[register[1]] = None

    def _do(self, line: str, *, reads: str | None = None) -> None:
        for name in _NAMES.findall(line if reads is None else reads):
            self._need(name)
        self._body.append(line)

    def _need(self, name: str) -> None:
        if name not in self._made:
            self._needed[name] = None


def _order(instruction: SlotInstruction) -> int:
    """Order the instructions of a bundle: phis before their readers, loads before stores."""
    return 0 if instruction.opcode == "sphi" else 2 if instruction.opcode == "sst" else 1


def _guard(instruction: SlotInstruction) -> str:
    if not instruction.predicate:
        return "True"
    if instruction.predicate == NEVER:
        return "False"
    return value_source(f"{'!' if instruction.negated else ''}%{instruction.predicate}")


def _value(instruction: SlotInstruction) -> str:
    if instruction.opcode == "sld":
        address = _MEMORY.match(instruction.text)
        return f"load({address_source(address[1])})" if address else "UNKNOWN"
    if instruction.opcode.startswith("inlined_call_operand"):
        found = _OPERAND.search(instruction.text)
        if found is None:
            return "UNKNOWN"
        index = int(found[1])
        return f"operand({index})" if "<" in instruction.opcode else str(operand_address(index))
    return expression(instruction)


def _transfer(instruction: SlotInstruction, values: Sequence[str]) -> str:
    guard = _guard(instruction)
    if instruction.opcode.startswith("dma.done.wait") and len(values) >= 2:
        return f"wait({guard},{values[0]},{values[1]},"
    if len(values) < 4:
        raise XLACompilationError(
            f"a transfer of a kernel ({instruction.opcode}) has operands that cannot be read; "
            "it cannot be timed."
        )
    source, size, destination, flag = values[:4]
    return f"issue({guard},{instruction.opcode!r},{source},{size},{destination},{flag},"
