"""Walk a scheduled program as the chip would run it: one core, and engines beside it.

The core issues instructions in order. Copies between HBM and VMEM drain in the background with
whatever HBM bandwidth the running op leaves over; collectives and host transfers run on their
own links; a "done" waits for what is not finished. A loop's body is simulated once.
"""

from typing import Protocol

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
from .network import Network, SliceExchange
from .simulation_state import Frame, SpanCollector, TrackSpan
from .work import FREE, OpWork, work_of

_STAND_FOR_OPERAND = ("get-tuple-element", "bitcast")


class KernelTimer(Protocol):
    """Knows how long a Pallas kernel runs; None when it does not."""

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None:
        """Seconds of one call."""
        ...


class Simulation:
    """One run of a program on a machine; `ledger` holds what happened."""

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
        """The time of one step."""
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
        """The longest branch: devices take different ones, and the others wait for the slowest."""
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
        """Start a collective that runs beside the core."""
        transfer = self.network.transfer(collective)
        begin = frame.occupy("ici", instruction.name, transfer.lanes, transfer.seconds)
        self.ledger.overlap("ici", transfer.seconds, frame.times)
        self._span(
            transfer.track, instruction, frame, begin, transfer.seconds, "ici",
            moved=collective.bytes,
        )  # fmt: skip

    def _between_slices(self, instruction: Instruction, frame: Frame) -> None:
        """A send starts the exchange; its receive, posted whenever, is filled when that ends."""
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
        """An asynchronous copy or slice: between HBM and VMEM, or over the host link."""
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
        """Memory that an asynchronous copy or slice writes to."""
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
        """Let the core wait until what was started as `name` is finished."""
        if name not in frame.pending:
            return
        waited_on, wait = frame.finish(name)
        if wait > 0:
            cause = "host" if waited_on.endswith("host") else waited_on
            self._span("core", instruction, frame, frame.now, wait, cause)
            self.ledger.charge(cause, wait, frame.times)
            frame.advance(wait)

    def _cut_collective(self, instruction: Instruction, frame: Frame) -> bool:
        """A collective cut into start, carrier and done fusions; carriers compute meanwhile."""
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
        """A collective the core waits for, alone or fused with products it overlaps."""
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
        """Anything else: bound by whichever of its needs takes longest."""
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
