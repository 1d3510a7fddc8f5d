"""A parser for the scheduled HLO text that the TPU compiler prints."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ...errors import XLACompilationError
from ...plain_data import JsonObject
from .shape import Shape, parse_shapes, reads_program, tuple_elements

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_CLOSING = re.compile(r'\}(?:, execution_thread="([^"]*)")?')
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"([a-z][\w\-]*)\(")
# `%loop#2#0`: from libtpu 0.0.50 on, elements of tuples have no instruction of their own.
_OPERAND = re.compile(r"%([\w.\-]+(?:#\d+)*)")
_CALLED = re.compile(
    r"\b(calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
HOST_THREAD = "host"
KERNEL_TARGET = "tpu_custom_call"


@dataclass(frozen=True)
class Instruction:
    """One instruction of a scheduled computation.

    Attributes:
        shapes: Its result: one array, or the leaves of a tuple.
        arguments: The text between its parentheses (a constant's value, a parameter's number).
        attributes: The text after them.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str = field(repr=False)
    is_root: bool = False

    @cached_property
    def called(self) -> Mapping[str, str]:
        """The computations that it calls, by role: calls, body, condition, true_computation."""
        return dict(_CALLED.findall(self.attributes))

    @cached_property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional with a numeric index."""
        found = _BRANCHES.search(self.attributes)
        return tuple(name.strip().lstrip("%") for name in found[1].split(",")) if found else ()

    @property
    def op_name(self) -> str:
        """Its origin in the user's program, as jax recorded it."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def stack_frame(self) -> int | None:
        """Number of its source frame."""
        found = _FRAME.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def custom_call_target(self) -> str:
        """Target of a custom call."""
        found = _TARGET.search(self.attributes)
        return found[1] if found else ""

    @property
    def is_kernel(self) -> bool:
        """Whether it calls a Pallas kernel."""
        return self.opcode == "custom-call" and self.custom_call_target == KERNEL_TARGET

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's own cycle count; present only after code generation."""
        found = _CYCLES.search(self.attributes)
        return int(found[1]) if found else None

    @cached_property
    def backend_config(self) -> JsonObject:
        """The compiler's annotations, e.g. the algorithm of a collective."""
        _, found, text = self.attributes.partition("backend_config=")
        if not found:
            return {}
        try:
            notes, _ = json.JSONDecoder().raw_decode(text)
        except json.JSONDecodeError:
            return {}
        return notes if isinstance(notes, dict) else {}

    def attribute(self, name: str) -> str | None:
        """Return the text of an attribute, e.g. `attribute("dimensions")` → "0"."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]+)", self.attributes)
        return found[1].strip("{}") if found else None


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they are issued.

    Attributes:
        runs_on_host: Whether the host computes it (`compute_on("device_host")`).
    """

    name: str
    instructions: tuple[Instruction, ...]
    runs_on_host: bool = False

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result the computation returns."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        return {int(i.arguments): i for i in self.instructions if i.opcode == "parameter"}

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)


@dataclass(frozen=True)
class HloModule:
    """A whole program."""

    name: str
    computations: Mapping[str, Computation] = field(repr=False)
    entry_name: str
    header: str = field(repr=False, default="")

    @property
    def entry(self) -> Computation:
        """The entry computation."""
        return self.computations[self.entry_name]

    def called_by(self, instruction: Instruction) -> list[Computation]:
        """Return every computation that the instruction calls, in a fixed order."""
        names = [*instruction.called.values(), *instruction.branches]
        return [self.computations[name] for name in names if name in self.computations]

    def nested(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yield every instruction inside the callees of `instruction`, at any depth."""
        for computation in self.called_by(instruction):
            for inner in computation:
                yield inner
                yield from self.nested(inner)

    @cached_property
    def num_partitions(self) -> int:
        """Number of devices that run the program together."""
        found = re.search(r"num_partitions=(\d+)", self.header)
        return int(found[1]) if found else 1


@reads_program
def parse_hlo(text: str) -> HloModule:
    """Read scheduled HLO text.

    Raises:
        XLACompilationError: The text is not HLO, or has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = header = ""
    name = ""
    body = _Body()
    for line in _logical_lines(text):
        if line.startswith("HloModule"):
            header = line
        elif closing := _CLOSING.fullmatch(line):
            if name and body.instructions:
                instructions = tuple(body.instructions)
                computations[name] = Computation(name, instructions, closing[1] == HOST_THREAD)
            name, body = "", _Body()
        elif name:
            body.add(line)
        elif opened := _COMPUTATION.match(line):
            name = opened[2]
            entry = name if opened[1] else entry
    if entry not in computations:
        raise XLACompilationError(
            "the text is not a scheduled HLO program: it has no ENTRY computation; "
            "pass the compiler's complete output."
        )
    module_name = header.split(",")[0].removeprefix("HloModule").strip()
    return HloModule(module_name, computations, entry, header)


def _logical_lines(text: str) -> Iterator[str]:
    """Yield the lines of the text, with instructions that span several lines joined.

    Kernels have metadata with line breaks, and those lines may begin with anything. Inside a
    computation only an instruction or a lone brace begins a new logical line.
    """
    pending = ""
    inside = False
    for line in text.splitlines():
        closes = _CLOSING.fullmatch(line) is not None
        if not inside or closes or _INSTRUCTION.match(line):
            if pending:
                yield pending
            pending = line
            inside = not closes and (inside or _COMPUTATION.match(line) is not None)
        else:
            pending += " " + line.strip()
    if pending:
        yield pending


class _Body:
    """The instructions of one computation while it is parsed, with their results."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self._results: dict[str, str] = {}

    def add(self, line: str) -> None:
        """Parse an instruction; other lines are ignored."""
        head = _INSTRUCTION.match(line)
        if head is None:
            return
        rest = line[head.end() :]
        if rest.startswith("("):
            end = _closing(rest, 0) + 1
            result, rest = rest[:end], rest[end:].lstrip()
        else:
            result, _, rest = rest.partition(" ")
        opcode = _OPCODE.match(rest)
        if opcode is None:
            return
        open_at = opcode.end() - 1
        close_at = _closing(rest, open_at)
        arguments = rest[open_at + 1 : close_at]
        operands = tuple(_OPERAND.findall(arguments))
        for operand in operands:
            self._add_element(operand)
        self._results[head[2]] = result
        self.instructions.append(
            Instruction(
                name=head[2],
                opcode=opcode[1],
                shapes=parse_shapes(result),
                operands=operands,
                arguments=arguments,
                attributes=rest[close_at + 1 :],
                is_root=bool(head[1]),
            )
        )

    def _add_element(self, name: str) -> None:
        """Add the instruction for an element written as `tuple#index`."""
        whole, marked, index = name.rpartition("#")
        if not marked or name in self._results:
            return
        self._add_element(whole)
        elements = tuple_elements(self._results.get(whole, ""))
        if int(index) >= len(elements):
            raise XLACompilationError(
                f"the program uses {name}, but defines no tuple with such an element; "
                "pass the compiler's complete output."
            )
        result = self._results[name] = elements[int(index)]
        self.instructions.append(
            Instruction(
                name=name,
                opcode="get-tuple-element",
                shapes=parse_shapes(result),
                operands=(whole,),
                arguments=f"%{whole}",
                attributes=f", index={index}",
            )
        )


def _closing(text: str, open_at: int) -> int:
    """Return the position of the closing parenthesis, ignoring quoted text."""
    depth, quoted, position = 0, False, open_at
    while position < len(text):
        character = text[position]
        if quoted:
            if character == "\\":
                position += 1
            elif character == '"':
                quoted = False
        elif character == '"':
            quoted = True
        elif character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return len(text)
