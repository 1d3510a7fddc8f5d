"""Simulate a scheduled program on one core with its copy engines and links.

The core issues instructions in order. Copies between HBM and VMEM drain in the background with the
HBM bandwidth that the running op leaves over. Collectives and host transfers run on their own
links. A "done" waits for what is not finished. A loop's body is simulated once.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

from ...plain_data import JsonObject
from ..hlo import (
    Collective,
    Computation,
    HloModule,
    Instruction,
    find_collective,
    trip_count,
)
from ..hlo.collectives import kind_of
from ..hlo.shape import HBM, HOST
from ..program_flops import KernelCounter
from .machine import FREE, Machine, OpWork, work_of
from .network import Network, SliceExchange

# Why the core was busy or waited. Order is the order of reports.
CAUSES = ("matrix", "hbm", "vector", "kernel", "ici", "dcn", "host", "overhead")


@dataclass
class Engine:
    """A queue of bytes that drains at a rate while the core does something else."""

    bytes_per_s: float
    queue: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])

    def drain(self, seconds: float) -> None:
        """Let the engine work for a while."""
        budget = seconds * self.bytes_per_s
        while self.queue and budget > 0:
            name, left = self.queue[0]
            if left > budget:
                self.queue[0] = (name, left - budget)
                return
            budget -= left
            self.queue.pop(0)

    def seconds_until(self, name: str) -> float:
        """Return the time until `name` is finished, if nothing else slows the engine."""
        waiting = 0.0
        for queued, left in self.queue:
            waiting += left
            if queued == name:
                return waiting / self.bytes_per_s
        return 0.0


@dataclass
class Frame:
    """The state of a computation while it runs: its clock, its engines and its pending ops.

    Attributes:
        times: Runs per step, including enclosing loops.
        offset: Start of its first run.
        lanes: Time at which each network lane is free again.
        pending: Started ops that were not awaited: their engine, or their network and end.
        alias: Other names of a started op, through tuples and updates.
    """

    machine: Machine
    computation: Computation
    times: int
    offset: float
    now: float = 0.0
    lanes: dict[str, float] = field(default_factory=dict[str, float])
    pending: dict[str, tuple[str, float | None]] = field(
        default_factory=dict[str, tuple[str, float | None]]
    )
    alias: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        hbm_rate = self.machine.hbm_bytes_per_s * self.machine.hbm_efficiency
        host_rate = self.machine.host_bytes_per_s
        self.engines = {
            "hbm": Engine(hbm_rate),
            "to host": Engine(host_rate),  # PCIe carries both ways at once
            "from host": Engine(host_rate),
        }

    def advance(self, seconds: float, *, hbm_s: float = 0.0) -> None:
        """Let time pass on the core, which itself uses HBM for `hbm_s` of it."""
        self.now += seconds
        for name, engine in self.engines.items():
            engine.drain(max(0.0, seconds - hbm_s) if name == "hbm" else seconds)

    def enqueue(self, engine: str, name: str, amount: float) -> float:
        """Start a copy of `amount` bytes; return its duration on an idle engine."""
        self.engines[engine].queue.append((name, amount))
        self.pending[name] = (engine, None)
        return amount / self.engines[engine].bytes_per_s

    def occupy(self, network: str, name: str, lanes: frozenset[str], seconds: float) -> float:
        """Start a transfer once its lanes are free; return when it begins."""
        begin = self.free_at(lanes)
        self.lanes.update(dict.fromkeys(lanes, begin + seconds))
        self.pending[name] = (network, begin + seconds)
        return begin

    def free_at(self, lanes: frozenset[str]) -> float:
        """Return when all of `lanes` are free, at the earliest now."""
        return max([self.now, *(self.lanes.get(lane, 0.0) for lane in lanes)])

    def finish(self, name: str) -> tuple[str, float]:
        """Return the engine or network of a pending op and its remaining time, and forget it."""
        waited_on, finish = self.pending.pop(name)
        if finish is None:
            return waited_on, self.engines[waited_on].seconds_until(name)
        return waited_on, max(0.0, finish - self.now)

    def source(self, name: str) -> str:
        """Return the started op that a name refers to."""
        while name in self.alias:
            name = self.alias[name]
        return name


@dataclass(frozen=True)
class TrackSpan:
    """One op on one track, from the first time it runs.

    Attributes:
        track: "core", "hbm", "ici x" (the axes it uses), "dcn", "host".
        cause: What bounds it, one of `CAUSES`, or "loop".
        times: Runs per step, including enclosing loops.
    """

    track: str
    name: str
    start_s: float
    duration_s: float
    cause: str
    op_name: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    times: int = 1

    def to_dict(self) -> JsonObject:
        """Return the span as plain data."""
        return dict(vars(self))


@dataclass
class SpanCollector:
    """Collects spans and sums seconds by cause while a simulation runs."""

    spans: list[TrackSpan] = field(default_factory=list[TrackSpan])
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    hidden_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    formats: set[str] = field(default_factory=set[str])
    unknown_loops: list[str] = field(default_factory=list[str])
    unknown_kernels: list[str] = field(default_factory=list[str])

    def charge(self, cause: str, seconds: float, times: int) -> None:
        """Add core time (work or waiting) to a cause."""
        if seconds > 0:
            self.seconds[cause] += seconds * times

    def overlap(self, cause: str, seconds: float, times: int) -> None:
        """Add the total duration of an asynchronous op, hidden or not."""
        self.hidden_s[cause] += seconds * times


_STAND_FOR_OPERAND = ("get-tuple-element", "bitcast")


class KernelTimer(Protocol):
    """Returns the duration of a Pallas kernel, or None if it cannot."""

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None:
        """Return the seconds of one call."""
        ...


class Simulation:
    """One run of a program on a machine; `ledger` has the events."""

    def __init__(
        self,
        module: HloModule,
        network: Network,
        *,
        kernel_timer: KernelTimer | None = None,
        kernel_counter: KernelCounter | None = None,
    ) -> None:
        self.module = module
        self.network = network
        self.machine = network.machine
        self.kernel_timer = kernel_timer
        self.kernel_counter = kernel_counter or KernelCounter(module)
        self.ledger = SpanCollector()
        # The first that says an instruction is its own has dealt with it.
        self._handlers = (
            self._loop,
            self._branch,
            self._done,
            self._start,
            self._cut_collective,
            self._collective,
            self._kernel,
        )

    def run(self) -> float:
        """Return the time of one step."""
        return self._computation(self.module.entry, times=1, offset=0.0)

    def _computation(self, computation: Computation, *, times: int, offset: float) -> float:
        frame = Frame(self.machine, computation, times, offset)
        for instruction in computation:
            if instruction.opcode in FREE:
                if instruction.opcode in _STAND_FOR_OPERAND:
                    frame.alias[instruction.name] = instruction.operands[0]
                continue
            if not any(handle(instruction, frame) for handle in self._handlers):
                self._op(instruction, frame)
        return frame.now

    def _loop(self, instruction: Instruction, frame: Frame) -> bool:
        if instruction.opcode not in ("while", "call"):
            return False
        trips = 1
        if instruction.opcode == "while":
            known = trip_count(instruction, frame.computation, self.module)
            if known is None:
                self.ledger.unknown_loops.append(instruction.name)
            trips = 1 if known is None else known
        bodies = [
            body
            for body in self.module.called_by(instruction)
            if body.name != instruction.called.get("condition")
        ]
        start = frame.now
        for body in bodies[:1] if trips else ():
            once = self._computation(body, times=frame.times * trips, offset=frame.offset + start)
            frame.advance(once * trips)
        if frame.now > start and instruction.opcode == "while":
            self._span("core", instruction, frame, start, frame.now - start, "loop")
        return True

    def _branch(self, instruction: Instruction, frame: Frame) -> bool:
        """Run the longest branch: devices take different ones, and all wait for the slowest."""
        if instruction.opcode != "conditional":
            return False

        def alone(branch: Computation) -> float:
            trial = Simulation(
                self.module,
                self.network,
                kernel_timer=self.kernel_timer,
                kernel_counter=self.kernel_counter,
            )
            return trial._computation(branch, times=1, offset=0.0)

        for longest in sorted(self.module.called_by(instruction), key=alone)[-1:]:
            offset = frame.offset + frame.now
            frame.advance(self._computation(longest, times=frame.times, offset=offset))
        return True

    def _start(self, instruction: Instruction, frame: Frame) -> bool:
        opcode = instruction.opcode
        if not opcode.endswith("-start") and opcode not in ("send", "recv"):
            return False
        collective = find_collective(instruction, frame.computation, self.module)
        if collective is not None:
            self._send_off(instruction, collective, frame)
        elif opcode in ("send", "recv"):
            self._between_slices(instruction, frame)
        else:
            self._copy(instruction, frame)
        return True

    def _send_off(self, instruction: Instruction, collective: Collective, frame: Frame) -> None:
        """Start a collective that runs in parallel to the core."""
        transfer = self.network.transfer(collective)
        begin = frame.occupy("ici", instruction.name, transfer.lanes, transfer.seconds)
        self.ledger.overlap("ici", transfer.seconds, frame.times)
        self._span(
            transfer.track, instruction, frame, begin, transfer.seconds, "ici",
            moved=collective.bytes,
        )  # fmt: skip

    def _between_slices(self, instruction: Instruction, frame: Frame) -> None:
        """Handle a send, which starts the exchange, or its receive, which ends with it."""
        exchange = SliceExchange.of(instruction)
        if instruction.opcode == "recv":
            frame.alias[instruction.name] = exchange.name
            return
        seconds = exchange.seconds(self.machine)
        begin = frame.occupy("dcn", exchange.name, frozenset(("dcn",)), seconds)
        # The send itself is over once the bytes are in the host's memory.
        frame.enqueue("to host", instruction.name, float(exchange.sent_bytes))
        self.ledger.overlap("dcn", seconds, frame.times)
        self._span(
            "dcn", instruction, frame, begin, seconds, "dcn", moved=exchange.wire_bytes
        )  # fmt: skip

    def _copy(self, instruction: Instruction, frame: Frame) -> None:
        """Handle an asynchronous copy or slice, between HBM and VMEM or over the host link."""
        shapes = [shape for shape in instruction.shapes if shape.elements > 1]
        spaces = {shape.memory_space for shape in shapes}
        # Source and target are both listed; a slice moves the smaller of them.
        moved = float(min((shape.padded_bytes for shape in shapes), default=0))
        cause = engine = "hbm"
        if HOST in spaces:
            cause = "host"
            engine = "to host" if self._target_space(instruction) == HOST else "from host"
        elif spaces == {HBM}:
            moved *= 2  # read and written
        seconds = frame.enqueue(engine, instruction.name, moved)
        self.ledger.overlap(cause, seconds, frame.times)
        self._span(cause, instruction, frame, frame.now, seconds, cause, moved=moved)

    def _target_space(self, instruction: Instruction) -> int:
        """Return the memory that an asynchronous copy or slice writes to."""
        called = self.module.called_by(instruction)
        target = called[0].root if called else instruction
        return target.shapes[0].memory_space

    def _done(self, instruction: Instruction, frame: Frame) -> bool:
        if not instruction.opcode.endswith(("-done", "-update")):
            return False
        if instruction.operands:
            name = frame.source(instruction.operands[0])
            if instruction.opcode.endswith("-done"):
                self._await(name, instruction, frame)
            frame.alias[instruction.name] = name
        return True

    def _await(self, name: str, instruction: Instruction, frame: Frame) -> None:
        """Let the core wait until the op started as `name` is finished."""
        if name not in frame.pending:
            return
        waited_on, wait = frame.finish(name)
        if wait > 0:
            cause = "host" if waited_on.endswith("host") else waited_on
            self._span("core", instruction, frame, frame.now, wait, cause)
            self.ledger.charge(cause, wait, frame.times)
            frame.advance(wait)

    def _cut_collective(self, instruction: Instruction, frame: Frame) -> bool:
        """Handle a collective split into start, carrier and done fusions; carriers compute."""
        if instruction.opcode != "fusion":
            return False
        marks = {
            inner.custom_call_target
            for inner in self.module.nested(instruction)
            if inner.opcode == "custom-call"
        }
        carried = [
            name for name in map(frame.source, instruction.operands) if name in frame.pending
        ]
        if "AsyncCollectiveStart" in marks:
            collective = find_collective(instruction, frame.computation, self.module)
            if collective is not None:
                self._send_off(instruction, collective, frame)
            return True
        if "AsyncCollectiveDone" in marks:
            for name in carried[:1]:
                self._await(name, instruction, frame)
            return True
        if carried and instruction.called["calls"].startswith("async_collective_fusion"):
            self._op(instruction, frame)
            frame.alias[instruction.name] = carried[0]
            return True
        return False

    def _collective(self, instruction: Instruction, frame: Frame) -> bool:
        """Handle a collective that the core waits for, alone or fused with matmuls."""
        collective = find_collective(instruction, frame.computation, self.module)
        if collective is None:
            return False
        alone = kind_of(instruction.opcode) is not None
        work = OpWork() if alone else work_of(instruction, frame.computation, self.module)
        product_s = self.machine.matrix_s(work.products)
        transfer = self.network.transfer(collective)
        network_s = frame.free_at(transfer.lanes) - frame.now + transfer.seconds
        seconds = max(network_s, product_s) + self.machine.op_overhead_s
        self.ledger.formats.update(product.dtype for product in work.products)
        self.ledger.charge("matrix", product_s, frame.times)
        self.ledger.charge("ici", seconds - product_s, frame.times)
        self.ledger.overlap("ici", transfer.seconds, frame.times)
        cause = "matrix" if product_s > network_s else "ici"
        self._span(
            "core", instruction, frame, frame.now, seconds, cause,
            flops=work.flops, moved=collective.bytes,
        )  # fmt: skip
        frame.advance(seconds)
        return True

    def _kernel(self, instruction: Instruction, frame: Frame) -> bool:
        if instruction.opcode != "custom-call":
            return False
        if not instruction.is_kernel:
            return True  # AllocateBuffer, ConcatBitcast and the like move nothing
        timer = self.kernel_timer
        seconds = None if timer is None else timer(instruction, frame.computation)
        if seconds is None:
            self.ledger.unknown_kernels.append(instruction.name)
            return True
        self.ledger.charge("kernel", seconds, frame.times)
        flops = self.kernel_counter(instruction, frame.computation).value or 0.0
        self._span("core", instruction, frame, frame.now, seconds, "kernel", flops=flops)
        frame.advance(seconds)
        return True

    def _op(self, instruction: Instruction, frame: Frame) -> None:
        """Handle any other op: its slowest resource decides its time."""
        work = work_of(instruction, frame.computation, self.module)
        needs = {
            "matrix": self.machine.matrix_s(work.products),
            "hbm": self.machine.hbm_s(work.hbm_bytes),
            "vector": work.vmem_bytes / self.machine.vmem_bytes_per_s,
        }
        cause = max(needs, key=lambda need: needs[need])
        if needs[cause] == 0.0:
            return
        overhead = self.machine.op_overhead_s
        self.ledger.formats.update(product.dtype for product in work.products)
        self.ledger.charge(cause, needs[cause], frame.times)
        self.ledger.charge("overhead", overhead, frame.times)
        seconds = needs[cause] + overhead
        self._span(
            "core", instruction, frame, frame.now, seconds, cause,
            flops=work.flops, moved=work.hbm_bytes,
        )  # fmt: skip
        frame.advance(seconds, hbm_s=needs["hbm"])

    def _span(
        self,
        track: str,
        instruction: Instruction,
        frame: Frame,
        start_s: float,
        duration_s: float,
        cause: str,
        *,
        flops: float = 0.0,
        moved: float = 0.0,
    ) -> None:
        self.ledger.spans.append(
            TrackSpan(
                track=track,
                name=instruction.name,
                start_s=frame.offset + start_s,
                duration_s=duration_s,
                cause=cause,
                op_name=instruction.op_name,
                flops=flops,
                bytes=moved,
                times=frame.times,
            )
        )
