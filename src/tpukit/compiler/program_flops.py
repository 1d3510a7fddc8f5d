"""Count the FLOPs of one run of a compiled program on one device: matmuls and kernels."""

import re
from dataclasses import dataclass, field
from functools import cached_property

from ..hardware import Figure
from .hlo import Computation, HloModule, Instruction, matrix_flops, nested_matrix_flops, trip_count
from .hlo.dataflow import Dataflow, Leaf
from .mosaic import Uncountable, kernel_flops

SOURCE = "matrix products of the scheduled program, and those in its Pallas kernels as they run"
_WHOLE = re.compile(r"-?\d+")
_TABLES = ("s8", "s16", "s32", "u8", "u16", "u32")
LARGEST_TABLE = 1 << 20
# What jax writes into the names of operations that `jax.checkpoint` runs a second time.
RECOMPUTED = "rematted_computation"


@dataclass(frozen=True)
class KernelFlops:
    """FLOPs of one call of a kernel.

    Attributes:
        value: The counted FLOPs, or those that the kernel states; None if neither exists.
        stated: Whether the value is the kernel's own statement.
        reason: Why they could not be counted.
    """

    value: float | None
    stated: bool = False
    reason: str = ""


@dataclass(frozen=True)
class KernelCounter:
    """Counts the FLOPs of a program's kernels by their grids, loops and branches."""

    module: HloModule
    _found: dict[str, KernelFlops] = field(default_factory=dict[str, KernelFlops], init=False)

    @cached_property
    def _flow(self) -> Dataflow:
        return Dataflow(self.module)

    def __call__(self, call: Instruction, parent: Computation) -> KernelFlops:
        """Return the FLOPs of one call."""
        if call.name not in self._found:
            self._found[call.name] = self._count(call, parent)
        return self._found[call.name]

    def _count(self, call: Instruction, parent: Computation) -> KernelFlops:
        config = call.backend_config.get("custom_call_config", {})
        try:
            if not config.get("body"):
                raise Uncountable("the call does not contain its program")
            return KernelFlops(kernel_flops(config["body"], self._tables(call, parent)))
        except Uncountable as reason:
            stated = float(config.get("cost_estimate", {}).get("flops", 0))
            return KernelFlops(stated or None, stated=bool(stated), reason=str(reason))

    def _tables(self, call: Instruction, parent: Computation) -> tuple[tuple[int, ...] | None, ...]:
        """Return the integer operands of a kernel that are constants of the program.

        Splash attention lists in them the blocks that it visits.
        """
        return tuple(self._constant(Leaf(parent.name, name)) for name in call.operands)

    def _constant(self, leaf: Leaf) -> tuple[int, ...] | None:
        shape = self._flow.instruction(leaf).shapes[0]
        if shape.dtype not in _TABLES or shape.elements > LARGEST_TABLE:
            return None
        found = {self._written(origin) for origin in self._flow.beginnings(leaf)}
        value = found.pop() if len(found) == 1 else None
        return value if value is not None and len(value) == shape.elements else None

    def _written(self, leaf: Leaf) -> tuple[int, ...] | None:
        instruction = self._flow.instruction(leaf)
        if instruction.opcode != "constant" or "..." in instruction.arguments:
            return None
        return tuple(map(int, _WHOLE.findall(instruction.arguments)))


def program_flops(module: HloModule, counter: KernelCounter | None = None) -> Figure:
    """Return the FLOPs of one run on one device, with recomputation; a branch counts its largest.

    The figure is missing, with the reason, if a part cannot be counted, because a smaller number
    would be wrong.
    """
    return _count(_Counting(module, counter or KernelCounter(module)), SOURCE)


def kernels_of_model_flops(module: HloModule, counter: KernelCounter | None = None) -> Figure:
    """Return the FLOPs of the program's own Pallas kernels in one run on one device.

    Kernels that `jax.checkpoint` runs a second time are left out, and so are those that the
    compiler generates from plain operations.
    """
    counting = _Counting(module, counter or KernelCounter(module), kernels_once=True)
    return _count(counting, "matmuls in the Pallas kernels of the scheduled program as they run")


def is_traced_kernel(call: Instruction) -> bool:
    """Whether the program itself calls the kernel; libtpu also generates some kernels."""
    return "pallas_call" in call.op_name


def _count(counting: "_Counting", source: str) -> Figure:
    flops = counting.computation(counting.module.entry)
    if counting.unknown:
        return Figure.missing("FLOP", "; ".join(dict.fromkeys(counting.unknown)))
    stated = list(dict.fromkeys(counting.stated))
    note = f"as they state them: {', '.join(stated)}" if stated else ""
    return Figure(flops, "FLOP", "compiler", source, note=note)


class _Counting:
    """Sums the FLOPs of computations; each computation is counted once and then reused."""

    def __init__(
        self, module: HloModule, counter: KernelCounter, *, kernels_once: bool = False
    ) -> None:
        self.module, self.counter, self.kernels_once = module, counter, kernels_once
        self.unknown: list[str] = []
        self.stated: list[str] = []
        self._known: dict[str, float] = {}

    def computation(self, computation: Computation) -> float:
        if computation.name not in self._known:
            parts = (self._instruction(instruction, computation) for instruction in computation)
            self._known[computation.name] = sum(parts)
        return self._known[computation.name]

    def _instruction(self, instruction: Instruction, parent: Computation) -> float:
        opcode = instruction.opcode
        if opcode == "while":
            return self._loop(instruction, parent)
        if instruction.is_kernel:
            again = RECOMPUTED in instruction.op_name
            if self.kernels_once and (again or not is_traced_kernel(instruction)):
                return 0.0
            return self._kernel(instruction, parent)
        if opcode == "fusion":
            return 0.0 if self.kernels_once else nested_matrix_flops(instruction, self.module)
        if opcode == "conditional":
            return max(map(self.computation, self.module.called_by(instruction)), default=0.0)
        if opcode == "call" or opcode.endswith("-start"):
            return sum(map(self.computation, self.module.called_by(instruction)))
        return 0.0 if self.kernels_once else matrix_flops(instruction, parent)

    def _loop(self, loop: Instruction, parent: Computation) -> float:
        once = self.computation(self.module.computations[loop.called["body"]])
        turns = trip_count(loop, parent, self.module)
        if turns is None and once:
            self.unknown.append(f"the loop {loop.name} has no constant length")
        return once * (turns or 0)

    def _kernel(self, call: Instruction, parent: Computation) -> float:
        found = self.counter(call, parent)
        if found.value is None:
            self.unknown.append(f"the kernel {call.name} cannot be counted: {found.reason}")
        elif found.stated:
            self.stated.append(call.name)
        return found.value or 0.0
