"""Run a kernel's scalar program and record its bundles, loops, transfers and waits.

Nothing is guessed. The run ends with an error if a branch, a transfer or a wait depends on an
unknown value, or if the program does not terminate.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import XLACompilationError
from .listing import InstructionListing
from .scalar import (
    ADDRESS,
    UNKNOWN,
    ScalarValue,
    allocation_address,
    operand_address,
    operand_of,
)
from .segments import Segment, cut_segments
from .units import Core

GRANULE_BYTES = 32
DEFAULT_STEP_LIMIT = 4_000_000


@dataclass(frozen=True)
class Transfer:
    """The start of a transfer, or a wait for one, at a point of the program.

    Attributes:
        cycle: Compute cycles before it.
        flag: The semaphore that it signals or waits for.
        granules: Its size in units of 32 bytes.
        direction: "in" or "out" of the core, "local" inside it, "signal" where the core itself
            adds to the semaphore, "wait" for a wait.
    """

    cycle: int
    flag: int
    granules: int
    direction: str


@dataclass(frozen=True)
class CoreRun:
    """The recorded run of one core.

    Attributes:
        bundles: Number of issued bundles.
        compute_cycles: Cycles of issuing and of waiting for results, without transfers.
        busy: Used slots per unit (engine cycles for MXU and XLU).
        waits: Compute cycles spent waiting, by cause.
        product_cycles: Cycles of the matmuls alone, over all matrix units.
        loop_turns: Iterations of its outermost loops: the grid steps, plus those that only fill
            or drain the pipeline.
        transfers: Every transfer and wait, in order.
    """

    bundles: int
    compute_cycles: int
    busy: Mapping[str, int]
    waits: Mapping[str, int]
    product_cycles: int
    loop_turns: int
    transfers: Sequence[Transfer] = field(repr=False)


class RunningCore:
    """A core during the run, with its scalar memory."""

    def __init__(self, core_number: int, tables: Mapping[int, Sequence[int]]) -> None:
        self.now = 0
        self.transfers: list[Transfer] = []
        self._tables = tables
        self._memory: dict[int, ScalarValue] = {allocation_address(0): core_number}
        self._values: dict[str, ScalarValue] = {}
        for index, words in tables.items():
            self._write(operand_address(index), words)

    def run(self, segment: Segment) -> ScalarValue:
        """Run one segment; return whether the branch inside it is taken."""
        taken = segment.run(
            self._values,
            self._load,
            self._store,
            self._issue,
            self._wait,
            self._signal,
            self._meet,
            self._operand,
        )
        self.now += segment.stretch.cycles
        return taken

    def _write(self, address: int, words: Sequence[int]) -> None:
        for offset, word in enumerate(words):
            self._memory[address + offset] = word

    def _operand(self, index: int) -> ScalarValue:
        words = self._tables.get(index)
        return words[0] if words else UNKNOWN

    def _load(self, address: ScalarValue) -> ScalarValue:
        return UNKNOWN if address is UNKNOWN else self._memory.get(address, UNKNOWN)

    def _store(self, predicate: ScalarValue, address: ScalarValue, value: ScalarValue) -> None:
        if predicate is False:
            return
        if address is UNKNOWN:
            raise XLACompilationError(
                "the kernel writes scalar memory at an unknown address, so what "
                "it does afterwards is not known either."
            )
        self._memory[address] = UNKNOWN if predicate is UNKNOWN else value

    def _issue(
        self,
        predicate: ScalarValue,
        opcode: str,
        source: ScalarValue,
        size: ScalarValue,
        target: ScalarValue,
        flag: ScalarValue,
        at: int,
    ) -> None:
        if predicate is False:
            return
        if predicate is UNKNOWN or size is UNKNOWN or flag is UNKNOWN:
            raise XLACompilationError(
                f"a transfer of the kernel ({opcode}) depends on an unknown value; "
                "pass the integers it prefetches as concrete arguments."
            )
        if opcode.endswith("_to_smem"):
            self._fill_table(source, target)
        origin, _, destination = opcode.removeprefix("dma.").partition("_to_")
        direction = (
            "out" if destination == "hbm" else "local" if origin in ("vmem", "smem") else "in"
        )
        self.transfers.append(Transfer(self.now + at, flag, size, direction))

    def _fill_table(self, source: ScalarValue, target: ScalarValue) -> None:
        index = operand_of(source)
        words = None if index is None else self._tables.get(index)
        if words is not None and target is not UNKNOWN and target >= ADDRESS:
            self._write(target, words)

    def _wait(self, predicate: ScalarValue, flag: ScalarValue, size: ScalarValue, at: int) -> None:
        if predicate is False:
            return
        if predicate is UNKNOWN or size is UNKNOWN or flag is UNKNOWN:
            raise XLACompilationError(
                "the kernel waits for a transfer in a way that depends on a value that is not "
                "known here; pass the integers it prefetches as concrete arguments."
            )
        self.transfers.append(Transfer(self.now + at, flag, size, "wait"))

    def _signal(
        self, predicate: ScalarValue, flag: ScalarValue, amount: ScalarValue, at: int
    ) -> None:
        # A wait here takes what it waited for, so the subtraction that follows it changes nothing.
        # A block cut at the edge of an array moves less, and the core adds what is missing.
        if predicate is False or (amount is not UNKNOWN and amount <= 0):
            return
        if predicate is UNKNOWN or amount is UNKNOWN or flag is UNKNOWN:
            raise XLACompilationError(
                "the kernel signals a semaphore in a way that depends on a value that is not "
                "known here; pass the integers it prefetches as concrete arguments."
            )
        self.transfers.append(Transfer(self.now + at, flag, amount, "signal"))

    def _meet(self, predicate: ScalarValue) -> None:
        if predicate is not False:
            raise XLACompilationError(
                "the kernel waits for a semaphore that something else sets; how long cannot be "
                "told from its program."
            )


def run_program(
    listing: InstructionListing,
    core: Core,
    *,
    core_number: int = 0,
    tables: Mapping[int, Sequence[int]] | None = None,
    step_limit: int = DEFAULT_STEP_LIMIT,
) -> CoreRun:
    """Run a kernel's scalar program on one core.

    Args:
        listing: The program.
        core: The generation's core.
        core_number: Index among the cores that share the work.
        tables: Words of the known scalar operands, by operand number.
        step_limit: The run is abandoned after this many code segments.

    Raises:
        XLACompilationError: The program depends on an unknown value, or does not terminate.
    """
    segments = cut_segments(listing, core)
    running = RunningCore(core_number, tables or {})
    visits: Counter[int] = Counter()
    position, end = 0, len(listing.bundles)
    steps = 0
    pending: tuple[int, int] | None = None  # a taken branch: where it leaves, where it goes
    while position < end:
        if steps == step_limit:
            raise XLACompilationError(
                f"the kernel had not ended after {step_limit:,} code segments; "
                "time a smaller shape and scale."
            )
        steps += 1
        segment = segments[position]
        visits[position] += 1
        taken = running.run(segment)
        if taken is not None:
            leave, target = segment.branch_end, segment.branch_target
            pending = (
                (leave, target) if taken and leave is not None and target is not None else None
            )
        position = segment.end
        if pending is not None and position >= pending[0]:
            position, pending = pending[1], None
    busy: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    for start, times in visits.items():
        stretch = segments[start].stretch
        for unit, amount in stretch.busy.items():
            busy[unit] += amount * times
        for cause, amount in stretch.waits.items():
            waits[cause] += amount * times
    return CoreRun(
        bundles=sum((segments[at].end - at) * times for at, times in visits.items()),
        compute_cycles=running.now,
        busy=busy,
        waits=waits,
        product_cycles=sum(
            segments[at].stretch.product_cycles * times for at, times in visits.items()
        ),
        loop_turns=sum(
            times
            for at, times in visits.items()
            if segments[at].is_loop_body and segments[at].depth == 1
        ),
        transfers=tuple(running.transfers),
    )
