"""Walk a scheduled program as the chip would run it: one core, and engines beside it.

The core issues instructions in order. Copies between HBM and VMEM drain in the background with
whatever HBM bandwidth the running op leaves over; collectives and host transfers run on their
own links; a "done" waits for what is not finished. A loop's body is simulated once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ..hlo import Collective, Computation, HloModule, Instruction, find_collective, trip_count
from ..hlo.collectives import kind_of
from ..hlo.shape import HBM, HOST, VMEM
from .machine import Machine
from .network import Network
from .spans import Ledger, Span
from .work import FREE, work_of

_COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
_LOOK_THROUGH = ("get-tuple-element", "bitcast", "copy-done")


class KernelTimer(Protocol):
    """Knows how long a Pallas kernel runs; None when it does not."""

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None: ...


@dataclass
class _Engine:
    """A queue of bytes that drains at a rate while the core does something else."""

    bytes_per_s: float
    queue: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])

    def drain(self, seconds: float) -> None:
        budget = seconds * self.bytes_per_s
        while self.queue and budget > 0:
            name, left = self.queue[0]
            if left > budget:
                self.queue[0] = (name, left - budget)
                return
            budget -= left
            self.queue.pop(0)

    def seconds_until(self, name: str) -> float:
        """How long until `name` is through, if nothing else slows the engine."""
        waiting = 0.0
        for queued, left in self.queue:
            waiting += left
            if queued == name:
                return waiting / self.bytes_per_s
        return 0.0


@dataclass
class _Clock:
    """Time and engines while one computation runs."""

    machine: Machine
    now: float = 0.0
    lanes: dict[str, float] = field(default_factory=dict[str, float])
    pending: dict[str, tuple[str, float]] = field(default_factory=dict[str, tuple[str, float]])
    alias: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        rate = self.machine.hbm_bytes_per_s * self.machine.hbm_efficiency
        self.engines = {
            "hbm": _Engine(rate),
            "to host": _Engine(self.machine.host_bytes_per_s),  # PCIe carries both ways at once
            "from host": _Engine(self.machine.host_bytes_per_s),
        }

    def advance(self, seconds: float, *, hbm_s: float = 0.0) -> None:
        """Let time pass on the core; `hbm_s` of it the core itself used HBM."""
        self.now += seconds
        for name, engine in self.engines.items():
            engine.drain(max(0.0, seconds - hbm_s) if name == "hbm" else seconds)

    def source(self, name: str) -> str:
        """The async op a name stands for, seen through tuples and updates."""
        while name in self.alias:
            name = self.alias[name]
        return name


class Simulation:
    """One run of a program on a machine."""

    def __init__(
        self,
        module: HloModule,
        network: Network,
        *,
        kernel_timer: KernelTimer | None = None,
    ) -> None:
        self.module = module
        self.network = network
        self.machine = network.machine
        self.kernel_timer = kernel_timer
        self.ledger = Ledger()
        self._handlers: tuple[Callable[..., bool], ...] = (
            self._loop,
            self._done,
            self._start,
            self._fused_collective,
            self._collective,
            self._kernel,
        )

    def run(self) -> float:
        """The time of one step."""
        return self._computation(self.module.entry, times=1, offset=0.0)

    def _computation(self, computation: Computation, *, times: int, offset: float) -> float:
        clock = _Clock(self.machine)
        for instruction in computation:
            if instruction.opcode in FREE:
                if instruction.opcode in _LOOK_THROUGH and instruction.operands:
                    clock.alias[instruction.name] = instruction.operands[0]
                continue
            for handle in self._handlers:
                if handle(instruction, computation, clock, times, offset):
                    break
            else:
                self._op(instruction, computation, clock, times, offset)
        return clock.now

    # Each handler says whether the instruction was its own.

    def _loop(
        self,
        instruction: Instruction,
        parent: Computation,
        clock: _Clock,
        times: int,
        offset: float,
    ) -> bool:
        if instruction.opcode not in ("while", "call", "conditional"):
            return False
        trips = 1
        if instruction.opcode == "while":
            known = trip_count(instruction, parent, self.module)
            if known is None:
                self.ledger.unknown_loops.append(instruction.name)
            trips = 1 if known is None else known
        name = instruction.called.get("body") or instruction.called.get("to_apply")
        bodies = [self.module.computations[name]] if name in self.module.computations else [
            self.module.computations[branch] for branch in instruction.branches
        ]  # fmt: skip
        start = clock.now
        for body in bodies[:1] if trips else ():
            once = self._computation(body, times=times * trips, offset=offset + start)
            clock.advance(once * trips)
        if clock.now > start and instruction.opcode == "while":
            self._span("core", instruction, start + offset, clock.now - start, "loop", times)
        return True

    def _start(
        self,
        instruction: Instruction,
        parent: Computation,
        clock: _Clock,
        times: int,
        offset: float,
    ) -> bool:
        opcode = instruction.opcode
        if not opcode.endswith("-start") and opcode not in ("send", "recv"):
            return False
        collective = find_collective(instruction, parent, self.module)
        if collective is not None:
            self._send_off(instruction, collective, clock, times, offset)
        elif opcode in ("send", "recv"):
            self._dcn(instruction, clock, times, offset)
        else:
            self._copy(instruction, parent, clock, times, offset)
        return True

    def _send_off(
        self,
        instruction: Instruction,
        collective: Collective,
        clock: _Clock,
        times: int,
        offset: float,
    ) -> None:
        """Start a collective that runs beside the core."""
        transfer = self.network.transfer(collective)
        begin = max([clock.now, *(clock.lanes.get(lane, 0.0) for lane in transfer.lanes)])
        finish = begin + transfer.seconds
        clock.lanes.update(dict.fromkeys(transfer.lanes, finish))
        clock.pending[instruction.name] = ("ici", finish)
        self.ledger.overlap("ici", transfer.seconds, times)
        self._span(
            "ici", instruction, begin + offset, transfer.seconds, "ici", times,
            moved=collective.bytes,
        )  # fmt: skip

    def _fused_collective(
        self,
        instruction: Instruction,
        parent: Computation,
        clock: _Clock,
        times: int,
        offset: float,
    ) -> bool:
        """A collective cut into start, carrier and done fusions; carriers compute meanwhile."""
        if instruction.opcode != "fusion":
            return False
        targets = {
            inner.custom_call_target
            for inner in self.module.nested(instruction)
            if inner.opcode == "custom-call"
        }
        carried = [
            name for name in map(clock.source, instruction.operands) if name in clock.pending
        ]
        if "AsyncCollectiveStart" in targets:
            collective = find_collective(instruction, parent, self.module)
            if collective is not None:
                self._send_off(instruction, collective, clock, times, offset)
            return True
        if "AsyncCollectiveDone" in targets:
            for name in carried[:1]:
                self._await(name, instruction, clock, times, offset)
            return True
        if carried and instruction.called["calls"].startswith("async_collective_fusion"):
            self._op(instruction, parent, clock, times, offset)
            clock.alias[instruction.name] = carried[0]
            return True
        return False

    def _copy(
        self,
        instruction: Instruction,
        parent: Computation,
        clock: _Clock,
        times: int,
        offset: float,
    ) -> None:
        """An asynchronous copy or slice: between HBM and VMEM, or over the host link."""
        shapes = [shape for shape in instruction.shapes if shape.elements > 1]
        spaces = {shape.memory_space for shape in shapes}
        # Source and target are both listed; a slice moves the smaller of them.
        moved = float(min((shape.padded_bytes for shape in shapes), default=0))
        kind = "host" if HOST in spaces else "hbm"
        which = "hbm"
        if kind == "host":
            which = "to host" if self._target_space(instruction) == HOST else "from host"
        engine = clock.engines[which]
        if kind == "hbm" and spaces == {HBM}:
            moved *= 2  # read and written
        engine.queue.append((instruction.name, moved))
        clock.pending[instruction.name] = (which, 0.0)
        self.ledger.overlap(kind, moved / engine.bytes_per_s, times)
        if spaces - {VMEM}:
            self._span(
                kind, instruction, clock.now + offset, moved / engine.bytes_per_s, kind, times,
                moved=moved,
            )  # fmt: skip

    def _target_space(self, instruction: Instruction) -> int:
        """Memory that an asynchronous copy or slice writes to."""
        called = self.module.called_by(instruction)
        return called[0].root.shapes[0].memory_space if called else (
            instruction.shapes[0].memory_space
        )  # fmt: skip

    def _dcn(self, instruction: Instruction, clock: _Clock, times: int, offset: float) -> None:
        moved = float(max((shape.bytes for shape in instruction.shapes), default=0))
        rate = self.machine.dcn_bytes_per_s
        lane = f"dcn-{instruction.opcode}"
        begin = max(clock.now, clock.lanes.get(lane, 0.0))
        finish = begin + (moved / rate if rate else 0.0)
        clock.lanes[lane] = finish
        clock.pending[instruction.name] = ("dcn", finish)
        self.ledger.overlap("dcn", finish - begin, times)
        self._span("dcn", instruction, begin + offset, finish - begin, "dcn", times, moved=moved)

    def _done(
        self,
        instruction: Instruction,
        parent: Computation,
        clock: _Clock,
        times: int,
        offset: float,
    ) -> bool:
        if instruction.opcode.endswith("-update"):
            clock.alias[instruction.name] = instruction.operands[0]
            return True
        if not instruction.opcode.endswith("-done"):
            return False
        if not instruction.operands:
            return True
        name = clock.source(instruction.operands[0])
        self._await(name, instruction, clock, times, offset)
        clock.alias[instruction.name] = name
        return True

    def _await(
        self, name: str, instruction: Instruction, clock: _Clock, times: int, offset: float
    ) -> None:
        """Let the core wait until what was started as `name` is finished."""
        if name in clock.pending:
            waited_for, finish = clock.pending.pop(name)
            engine = clock.engines.get(waited_for)
            wait = finish - clock.now if engine is None else engine.seconds_until(name)
            cause = "host" if waited_for.endswith("host") else waited_for
            if wait > 0:
                self._span("core", instruction, clock.now + offset, wait, cause, times)
                self.ledger.charge(cause, wait, times)
                clock.advance(wait)

    def _collective(
        self,
        instruction: Instruction,
        parent: Computation,
        clock: _Clock,
        times: int,
        offset: float,
    ) -> bool:
        """A collective the core waits for, alone or fused with products it overlaps."""
        collective = find_collective(instruction, parent, self.module)
        if collective is None:
            return False
        transfer = self.network.transfer(collective)
        work = work_of(instruction, parent, self.module) if not kind_of(instruction.opcode) else None
        product_s = self.machine.matrix_s(work.flops_by_dtype) if work else 0.0
        begin = max([clock.now, *(clock.lanes.get(lane, 0.0) for lane in transfer.lanes)])
        queue = begin - clock.now
        seconds = max(queue + transfer.seconds, product_s) + self.machine.op_overhead_s
        self.ledger.flops += (work.flops if work else 0.0) * times
        self.ledger.charge("matrix", min(product_s, seconds), times)
        self.ledger.charge("ici", seconds - product_s, times)
        self.ledger.overlap("ici", transfer.seconds, times)
        cause = "matrix" if product_s > transfer.seconds else "ici"
        self._span(
            "core", instruction, clock.now + offset, seconds, cause, times,
            moved=collective.bytes, flops=work.flops if work else 0.0,
        )  # fmt: skip
        clock.advance(seconds)
        return True

    def _kernel(
        self,
        instruction: Instruction,
        parent: Computation,
        clock: _Clock,
        times: int,
        offset: float,
    ) -> bool:
        if instruction.opcode != "custom-call":
            return False
        if instruction.custom_call_target != "tpu_custom_call":
            return True  # AllocateBuffer, ConcatBitcast and the like move nothing
        seconds = self.kernel_timer(instruction, parent) if self.kernel_timer else None
        if seconds is None:
            self.ledger.unknown_kernels.append(instruction.name)
            return True
        self.ledger.charge("kernel", seconds, times)
        self._span("core", instruction, clock.now + offset, seconds, "kernel", times)
        clock.advance(seconds)
        return True

    def _op(
        self,
        instruction: Instruction,
        parent: Computation,
        clock: _Clock,
        times: int,
        offset: float,
    ) -> None:
        work = work_of(instruction, parent, self.module)
        matrix_s = self.machine.matrix_s(work.flops_by_dtype)
        hbm_s = self.machine.hbm_s(work.hbm_bytes)
        vector_s = work.vmem_bytes / self.machine.vmem_bytes_per_s
        longest = max(matrix_s, hbm_s, vector_s)
        if longest == 0.0:
            return
        cause = {matrix_s: "matrix", hbm_s: "hbm", vector_s: "vector"}[longest]
        self.ledger.flops += work.flops * times
        self.ledger.charge(cause, longest, times)
        self.ledger.charge("overhead", self.machine.op_overhead_s, times)
        seconds = longest + self.machine.op_overhead_s
        self._span(
            "core", instruction, clock.now + offset, seconds, cause, times,
            flops=work.flops, moved=work.hbm_bytes,
        )  # fmt: skip
        clock.advance(seconds, hbm_s=hbm_s)

    def _span(
        self,
        track: str,
        instruction: Instruction,
        start_s: float,
        duration_s: float,
        cause: str,
        times: int,
        *,
        flops: float = 0.0,
        moved: float = 0.0,
    ) -> None:
        self.ledger.spans.append(
            Span(
                track,
                instruction.name,
                start_s,
                duration_s,
                cause,
                instruction.op_name,
                flops,
                moved,
                times,
            )
        )
