"""The programs in a profile, and the facts of each of their ops."""

import re
from dataclasses import dataclass
from functools import cached_property

from ...compiler.hlo import Computation, HloModule, Instruction, find_collective
from ...compiler.hlo.shape import HOST
from ...compiler.memory.sources import SourceTable
from ...compiler.timeline.machine import FREE, work_of
from ...errors import TPUValidationError, XLACompilationError
from .hlo_proto import read_program

CONTROL = frozenset(("while", "conditional", "call", "async-start", "async-done", "async-update"))
MOVING = frozenset(
    (
        *("copy", "transpose", "reshape", "broadcast", "slice", "concatenate", "pad", "reverse"),
        *("dynamic-slice", "dynamic-update-slice", "gather", "convert", "iota"),
    )
)
TRANSCENDENTAL = frozenset(
    (
        *("exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh"),
        *("sine", "cosine", "tan", "power", "rsqrt", "sqrt", "cbrt", "erf", "atan2"),
    )
)
# FLOPs of a transcendental function per element. A polynomial with its range reduction takes about
# this many on every device.
TRANSCENDENTAL_FLOPS = 20
_NOT_ARITHMETIC = FREE | MOVING | CONTROL | {"reduce", "fusion", "custom-call", "copy-start"}
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_PRODUCT = re.compile(r"gemm|matmul|conv|dot|attention|fmha|flash", re.IGNORECASE)
_HOST_CALL = re.compile(r"callback|HostExecute|MoveToHost|MoveToDevice", re.IGNORECASE)


@dataclass(frozen=True)
class OpFacts:
    """The facts of one op, from its program alone.

    Attributes:
        opcode: Of the instruction; of a matmul or collective inside a fusion.
        op_name: Where in the user's program it comes from, as jax wrote it.
        source: "file.py:12", or "" where unknown.
        collective: The kind of collective that it is, starts or waits for; "" for none.
        is_host: Whether it exchanges data with the host: infeed, callback, host memory.
        is_control: Whether it only runs other ops: a loop, a call.
        is_product: Whether it is a matmul, or calls a kernel with the name of one.
        matrix_flops: FLOPs of its matmuls; None where a kernel hides them.
        vector_flops: FLOPs of its elementwise arithmetic and reductions.
        moved_bytes: Bytes read and written in device memory; None where unknown.
        is_unfused: Whether it is one elementwise or moving op that the compiler did not fuse.
        runs_once: Whether it is in no loop or branch, so that it runs once per program run.
    """

    name: str
    opcode: str
    op_name: str
    source: str
    collective: str = ""
    is_host: bool = False
    is_control: bool = False
    is_product: bool = False
    matrix_flops: float | None = None
    vector_flops: float = 0.0
    moved_bytes: float | None = None
    is_unfused: bool = False
    runs_once: bool = False


class ProfiledProgram:
    """One program, parsed when its first op is looked up.

    Args:
        name: Of the module.
        content: Its HloModuleProto.

    Attributes:
        unreadable: Why it could not be parsed, or "".
    """

    def __init__(self, name: str, content: bytes) -> None:
        self.name = name
        self.unreadable = ""
        self._content = content
        self._facts: dict[str, OpFacts | None] = {}

    @cached_property
    def _read(self) -> tuple[HloModule, SourceTable]:
        """The program and its source lines; an empty program in place of a damaged one."""
        try:
            return read_program(self._content)
        except TPUValidationError as error:
            self.unreadable = str(error)
            return HloModule(self.name, {}, ""), SourceTable({})

    @property
    def module(self) -> HloModule:
        """The program; without computations where it is damaged."""
        return self._read[0]

    @cached_property
    def _homes(self) -> dict[str, Computation]:
        """The computation of every instruction, by the instruction's name."""
        return {
            instruction.name: computation
            for computation in self.module.computations.values()
            for instruction in computation
        }

    @cached_property
    def _kernels(self) -> dict[str, str]:
        """Instructions by the name of their GPU kernel, which has no dots and dashes."""
        return {re.sub(r"\W", "_", name): name for name in self._homes}

    def facts(self, name: str) -> OpFacts | None:
        """Return the facts of an op; None for an op that is not in the program."""
        if name not in self._facts:
            home = self._homes.get(name)
            self._facts[name] = self._describe(home.by_name[name], home) if home else None
        return self._facts[name]

    def facts_of_kernel(self, kernel: str) -> OpFacts | None:
        """Return the facts of the op that a kernel was generated from and named after."""
        name = self._kernels.get(kernel)
        return None if name is None else self.facts(name)

    def _describe(self, instruction: Instruction, home: Computation) -> OpFacts:
        module = self.module
        target = instruction.custom_call_target
        collective = _collective(instruction, home, module)
        # The ops inside a fusion tell more than its own opcode.
        inner = {nested.opcode for nested in module.nested(instruction)}
        product = bool({"dot", "convolution"} & {instruction.opcode, *inner})
        flops, moved = _work(instruction, home, module)
        if instruction.opcode == "custom-call":
            product = bool(_PRODUCT.search(target))
            flops = _library_product_flops(instruction, home)
        hosted = instruction.opcode in ("infeed", "outfeed", "infeed-done", "outfeed-done")
        hosted |= "is_host_transfer=true" in instruction.attributes
        hosted |= bool(_HOST_CALL.search(target))
        hosted |= instruction.opcode.startswith("copy") and _touches_host(instruction, home)
        return OpFacts(
            name=instruction.name,
            opcode=instruction.opcode,
            op_name=instruction.op_name,
            source=self._source_of(instruction),
            collective=collective,
            is_host=hosted,
            is_control=instruction.opcode in CONTROL and not collective,
            is_product=product,
            matrix_flops=flops,
            vector_flops=_vector_flops(instruction, home, module),
            moved_bytes=moved,
            is_unfused=not collective and not hosted and _is_unfused(instruction, module),
            runs_once=home.name == module.entry_name,
        )

    def _source_of(self, instruction: Instruction) -> str:
        """Return an instruction's source line; for a fusion without one, the line of its root."""
        sources = self._read[1]
        candidates = [instruction]
        candidates += [computation.root for computation in self.module.called_by(instruction)]
        for candidate in candidates:
            if line := sources.line_of(candidate.stack_frame):
                return line
            if found := _SOURCE.search(candidate.attributes):
                return f"{found[1]}:{found[2]}"
        return ""


def _collective(instruction: Instruction, home: Computation, module: HloModule) -> str:
    """Return the kind of collective; that of its start for the end of an asynchronous one."""
    opcode = instruction.opcode
    if opcode in ("send", "recv", "send-done", "recv-done"):
        hosted = "is_host_transfer=true" in instruction.attributes
        return "" if hosted else opcode.removesuffix("-done")
    if opcode.endswith("-done") and instruction.operands:
        started = home.by_name.get(instruction.operands[0])
        return "" if started is None else _collective(started, home, module)
    if opcode == "collective-broadcast":
        return opcode
    if opcode in ("while", "conditional", "call"):
        return ""  # the ops inside have events of their own
    collective = find_collective(instruction, home, module)
    return "" if collective is None else collective.kind


def _work(
    instruction: Instruction, home: Computation, module: HloModule
) -> tuple[float | None, float | None]:
    """Return matmul FLOPs and moved bytes; None for both where the program does not show them."""
    if instruction.opcode in CONTROL:
        return None, None
    try:
        work = work_of(instruction, home, module)
    except (KeyError, IndexError, XLACompilationError):
        return None, None  # a shape or operand that is not supported
    return work.flops, work.hbm_bytes


def _vector_flops(instruction: Instruction, home: Computation, module: HloModule) -> float:
    if instruction.opcode in CONTROL:
        return 0.0
    total = _arithmetic(instruction, home)
    if instruction.opcode == "fusion":
        for computation in module.called_by(instruction):
            total += sum(_vector_flops(inner, computation, module) for inner in computation)
    return total


def _arithmetic(instruction: Instruction, home: Computation) -> float:
    opcode = instruction.opcode
    if opcode in ("reduce", "reduce-window") and instruction.operands:
        operand = home.by_name.get(instruction.operands[0])
        return float(operand.shapes[0].elements) if operand and operand.shapes else 0.0
    if opcode in _NOT_ARITHMETIC or opcode in ("dot", "convolution") or not instruction.shapes:
        return 0.0
    each = TRANSCENDENTAL_FLOPS if opcode in TRANSCENDENTAL else 1
    return float(each * instruction.shapes[0].elements)


def _library_product_flops(instruction: Instruction, home: Computation) -> float | None:
    """Return the FLOPs of a cuBLAS call, whose backend config has the matmul's dimensions."""
    notes = instruction.backend_config.get("gemm_backend_config")
    left = home.by_name.get(instruction.operands[0]) if instruction.operands else None
    if not isinstance(notes, dict) or left is None or not instruction.shapes:
        return None
    try:
        dimensions = notes["dot_dimension_numbers"]["lhs_contracting_dimensions"]
        size = 1
        for dimension in dimensions:
            size *= left.shapes[0].dims[int(dimension)]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return 2.0 * instruction.shapes[0].elements * size


def _touches_host(instruction: Instruction, home: Computation) -> bool:
    operands = [home.by_name[name] for name in instruction.operands if name in home.by_name]
    return any(
        shape.memory_space == HOST for part in (instruction, *operands) for shape in part.shapes
    )


def _is_unfused(instruction: Instruction, module: HloModule) -> bool:
    """Return whether an op is a single elementwise or moving op, maybe in its own fusion."""
    if instruction.opcode == "fusion":
        inside = [
            inner
            for computation in module.called_by(instruction)
            for inner in computation
            if inner.opcode not in FREE
        ]
        return len(inside) == 1 and _is_unfused(inside[0], module)
    if instruction.opcode in MOVING:
        return True
    known = _NOT_ARITHMETIC | {"dot", "convolution", "sort", "scatter", "rng", "fft", "custom-call"}
    return instruction.opcode not in known and not instruction.called
