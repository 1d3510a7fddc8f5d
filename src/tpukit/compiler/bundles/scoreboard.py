"""When each bundle of a straight stretch of code issues: in order, waiting for results and engines.

The core stops at a bundle until every operand is there, the engine it starts is free, and the
result it takes from a queue has come out. The queues behind the matrix units give results in the
order of the products; a product gives as many as it takes rows.
"""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from .listing import InstructionBundle
from .units import Core, OpcodeReading, read_opcode

_TAKES_ENGINE = ("product", "weights", "lanes", "permute", "transpose")


@dataclass(frozen=True)
class Stretch:
    """The timing of one stretch.

    Attributes:
        issue_cycles: When each of its bundles issues, the first at 0.
        cycles: From its first bundle to the one after it.
        busy: Slots taken by unit; for MXU and XLU the cycles its engines were taken.
        waits: Cycles waited, by what for.
        product_cycles: Of all matrix units together, what their products alone take.
    """

    issue_cycles: tuple[int, ...]
    cycles: int
    busy: Counter[str]
    waits: Counter[str]
    product_cycles: int


class _Queues:
    """What comes out of the matrix units and the transposers."""

    def __init__(self, bundles: Sequence[InstructionBundle]) -> None:
        rows: Counter[str] = Counter()
        pops: Counter[str] = Counter()
        for bundle in bundles:
            for one in bundle.instructions:
                reading = read_opcode(one.opcode)
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
        """A product or transposition was started whose first result is there at `at`."""
        if reading.buffer is not None:
            self._buffers[reading.engine][reading.buffer] = at
        else:
            self._rows_in[reading.engine] += _rows(reading)
            self._queued[reading.engine].append((self._rows_in[reading.engine], at))

    def take(self, reading: OpcodeReading, now: int, spacing: int) -> int:
        """When the next result can be taken, which it then is."""
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
    """Whether results will come out of a queue for it."""
    return reading.kind == "product" or (reading.kind == "transpose" and reading.opens)


def _rows(reading: OpcodeReading) -> int:
    """Rows one product takes, relative to 32-bit operands: narrower ones are packed."""
    found = re.search(r"[1-9]\d*", reading.number_format)
    return max(1, 32 // int(found[0])) if found else 1


def time_stretch(bundles: Sequence[InstructionBundle], core: Core) -> Stretch:
    """Issue a stretch of bundles on an idle core."""
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
        for one in bundle.instructions:
            reading = read_opcode(one.opcode)
            for name in one.reads:
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
        for one in bundle.instructions:
            reading = read_opcode(one.opcode)
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
            if one.target:
                results[one.target] = done
        issued.append(now)
    return Stretch(tuple(issued), now + 1, busy, waits, product_cycles)
