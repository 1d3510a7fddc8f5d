"""Cut a kernel's program at its branches and make each piece a Python function.

A piece runs from a bundle where control can arrive to the next branch's last delay slot. Its
function computes the scalars, loads and stores scalar memory, and reports transfers; vector
instructions take time but change nothing that decides what happens next.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...errors import XLACompilationError
from .listing import NEVER, InstructionListing, SlotInstruction
from .scalar import (
    NAMESPACE,
    address_source,
    expression,
    operand_address,
    value_source,
)
from .scoreboard import Stretch, time_stretch
from .units import Core

_TARGET = re.compile(r"target = \$region(\d+)")
_MEMORY = re.compile(r"\[smem:\[(.*?)\]\]\s*,?\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"index: (\d+), kind: (\w+)")
_NAMES = re.compile(r"\b[sp]\d+_[sp]\d+\b")
_SCALAR = re.compile(r"[sp]\d+_([sp]\d+)$")
_NO_EFFECT = ("vsyncadd.remote", "vsyncpa", "vsyncset", "shalt", "sfence", "sphi", "sbr")


@dataclass(frozen=True)
class Segment:
    """A piece of the program.

    Attributes:
        end: Address of the bundle after it.
        run: Called with the values of names, and the machine's memory and transfer handlers;
            returns whether a branch inside it is taken, or None without one.
        branch_end: Address behind the delay slots of the branch inside it; None without one.
        branch_target: Where that branch goes.
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
    """Every segment of a program, by its first address."""
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
                "which is not followed; no time can be told."
            )
        stretch = time_stretch(bundles, core)
        writer = _Writer(names)
        for bundle, at_cycle in zip(bundles, stretch.issue_cycles, strict=True):
            for one in sorted(bundle.instructions, key=_order):
                writer.add(one, at_cycle)
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
        for one in bundle.instructions:
            if not one.opcode.startswith("sbr"):
                continue
            region = _TARGET.search(one.text)
            target = listing.region_starts.get(int(region[1])) if region else None
            if target is None and region and bundle.depth == 0:
                target = len(listing.bundles)  # a core, or a grid, that has nothing to do leaves
            slots = _delay_slots(listing, address, one, core)
            if target is None or address + slots >= len(listing.bundles):
                raise XLACompilationError(
                    f"the branch in bundle {address:#x} of a kernel goes nowhere in its listing; "
                    "no time can be told."
                )
            yield _Branch(address, address + 1 + slots, target)


def _delay_slots(
    listing: InstructionListing, address: int, branch: SlotInstruction, core: Core
) -> int:
    """How many bundles after a branch are issued even when it is taken.

    Older generations have a fixed number. TPU7x has up to six, which the listing does not state.
    What is jumped over begins with a region of its own: they reach up to it, where it begins that
    soon, or up to a transfer that needs what is computed only when the branch is not taken. Else
    they reach at least to the last bundle that is guarded against the branch being
    taken, and on to whatever must not run then (a transfer or a semaphore).
    """
    most = core.branch_delay_slots
    if not core.delay_slots_vary:
        return most
    following = listing.bundles[address + 1 : address + 1 + most]
    slots = 0
    only_without: set[str] = set()  # what is computed only when the branch is not taken
    for number, bundle in enumerate(following, start=1):
        guarded = [
            one
            for one in bundle.instructions
            if one.predicate == branch.predicate and one.negated != branch.negated
        ]
        if guarded:
            slots = number
            only_without.update(one.target for one in guarded)
    begins = (
        n
        for n, bundle in enumerate(following)
        if bundle.label
        or bundle.regions
        or any(_needs(one, only_without) for one in bundle.instructions)
    )
    region = next(begins, None)
    if region is not None:
        return max(slots, region)
    for bundle in following[slots:]:
        if any(map(_has_side_effect, bundle.instructions)):
            break
        slots += 1
    return slots


def _needs(one: SlotInstruction, names: set[str]) -> bool:
    """Whether it is a transfer, or a wait for one, that cannot be without these values."""
    return one.opcode.startswith("dma") and not names.isdisjoint(one.reads)


def _has_side_effect(one: SlotInstruction) -> bool:
    return one.opcode.startswith(("dma", "vsync", "vwait", "sbr", "sst"))


class _Names:
    """Which values leave the segment that computes them, and which registers a phi reads."""

    def __init__(self, listing: InstructionListing, ranges: Sequence[tuple[int, int]]) -> None:
        self.phi_registers: set[str] = set()
        read_in: defaultdict[str, set[int]] = defaultdict(set)
        made_in: dict[str, int] = {}
        for start, end in ranges:
            for bundle in listing.bundles[start:end]:
                for one in bundle.instructions:
                    for name in one.reads:
                        read_in[name].add(start)
                    if one.target:
                        made_in[one.target] = start
                    if one.opcode == "sphi":
                        register = _SCALAR.match(one.target)
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

    def add(self, one: SlotInstruction, at: int) -> None:
        """Write what an instruction does that issues `at` cycles after the segment's start."""
        opcode = one.opcode
        if opcode == "sphi":
            self._phi(one)
        elif opcode.startswith("dma"):
            values = [value_source(operand) for operand in one.operands]
            self._do(f"{_transfer(one, values)}{at})")
        elif opcode == "sst":
            stored = _MEMORY.match(one.text)
            if stored:
                where, value = address_source(stored[1]), value_source(stored[2])
                self._do(f"store({_guard(one)},{where},{value})")
        elif opcode == "vsyncadd" and len(one.operands) == 2:
            flag, amount = map(value_source, one.operands)
            self._do(f"signal({_guard(one)},{flag},{amount},{at})")
        elif opcode.startswith("vwait"):
            self._do(f"meet({_guard(one)})")
        elif opcode.startswith("sbr"):
            self._do(f"taken = {_guard(one)}")
            self._made["taken"] = None
        elif not opcode.startswith(_NO_EFFECT):
            self._define(one, _value(one))

    def source(self) -> str:
        """The whole function: values it needs, what it does, values others need."""
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

    def _phi(self, one: SlotInstruction) -> None:
        """A phi stands for what its register holds on entry."""
        register = _SCALAR.match(one.target)
        if register is not None:
            self._need(register[1])
            self._body.append(f"{one.target} = {register[1]}")
            self._made[one.target] = None

    def _define(self, one: SlotInstruction, source: str) -> None:
        register = _SCALAR.match(one.target)
        if register is None:
            return
        followed = register[1] in self._names.phi_registers
        if one.predicate:
            kept = register[1] if followed else "UNKNOWN"
            otherwise = value_source(f"%{one.otherwise}") if one.otherwise else kept
            if otherwise == register[1]:
                self._need(otherwise)
            source = f"choose({_guard(one)},{source},{otherwise})"
        self._do(f"{one.target} = {source}", reads=source)
        self._made[one.target] = None
        if followed:
            self._body.append(f"{register[1]} = {one.target}")
            self._made[register[1]] = None

    def _do(self, line: str, *, reads: str | None = None) -> None:
        for name in _NAMES.findall(line if reads is None else reads):
            self._need(name)
        self._body.append(line)

    def _need(self, name: str) -> None:
        if name not in self._made:
            self._needed[name] = None


def _order(one: SlotInstruction) -> int:
    """Phis before what reads them in the same bundle, and loads before stores."""
    return 0 if one.opcode == "sphi" else 2 if one.opcode == "sst" else 1


def _guard(one: SlotInstruction) -> str:
    if not one.predicate:
        return "True"
    if one.predicate == NEVER:
        return "False"
    return value_source(f"{'!' if one.negated else ''}%{one.predicate}")


def _value(one: SlotInstruction) -> str:
    if one.opcode == "sld":
        address = _MEMORY.match(one.text)
        return f"load({address_source(address[1])})" if address else "UNKNOWN"
    if one.opcode.startswith("inlined_call_operand"):
        found = _OPERAND.search(one.text)
        if found is None:
            return "UNKNOWN"
        index = int(found[1])
        return f"operand({index})" if "<" in one.opcode else str(operand_address(index))
    return expression(one)


def _transfer(one: SlotInstruction, values: Sequence[str]) -> str:
    guard = _guard(one)
    if one.opcode.startswith("dma.done.wait") and len(values) >= 2:
        return f"wait({guard},{values[0]},{values[1]},"
    if len(values) < 4:
        raise XLACompilationError(
            f"a transfer of a kernel ({one.opcode}) has operands that cannot be read; "
            "no time can be told."
        )
    source, size, destination, flag = values[:4]
    return f"issue({guard},{one.opcode!r},{source},{size},{destination},{flag},"
