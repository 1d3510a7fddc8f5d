"""Find the purpose of each buffer from argument names, operation names and data flow.

Nothing is guessed: a buffer that no rule matches is called unattributed.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..hlo import HloModule, Instruction, Shape
from ..hlo.dataflow import Dataflow, Leaf
from ..program.lowered import ProgramFacts
from .assignment import Schedule, Tenancy, Value

COMPUTED = "computed"
STATE = frozenset(("parameters", "optimizer state"))
_ONLY_COMPUTED = frozenset((COMPUTED,))
_MOVES_FIRST = frozenset(
    (
        *("slice", "dynamic-slice", "pad", "reshape", "transpose", "reverse", "convert"),
        *("bitcast-convert", "reduce-precision", "broadcast"),
    )
)
_COMBINES = frozenset(
    (
        *("add", "subtract", "multiply", "divide", "negate", "abs", "maximum", "minimum", "clamp"),
        *("select", "sqrt", "rsqrt", "cbrt", "power", "exponential", "log", "sign", "concatenate"),
        *("round-nearest-even", "round-nearest-afz", "floor", "ceil", "dynamic-update-slice"),
    )
)
_COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"),
    *("collective-broadcast", "async-", "slice-start", "slice-done", "dynamic-slice-start"),
    *("dynamic-slice-done", "dynamic-update-slice-start", "dynamic-update-slice-done"),
)
_MOVING_CALLS = frozenset(
    (
        *("AsyncCollectiveStart", "AsyncCollectiveDone", "ConcatBitcast", "MoveToHost"),
        *("MoveToDevice", "annotate_device_placement"),
    )
)
_BLANK = frozenset(("constant", "iota", "rng-bit-generator", "partition-id", "replica-id"))
_BLANK_CALLS = frozenset(("AllocateBuffer",))


@dataclass(frozen=True)
class Provenance:
    """The origins of a program's arrays.

    Attributes:
        categories: Purpose of each argument of the program, by number.
    """

    module: HloModule
    categories: Mapping[int, str]

    @cached_property
    def flow(self) -> Dataflow:
        """The paths of arrays through the program."""
        return Dataflow(self.module)

    def sources(self, leaf: Leaf) -> frozenset[str]:
        """Return an array's origins: kinds of arguments, and `COMPUTED`; a blank one has none."""
        found: set[str] = set()
        for origin in self._reached([leaf]):
            if self._comes_from(origin) is None:
                found |= self._kind(origin)
        return frozenset(found)

    def is_blank(self, leaf: Leaf) -> bool:
        """Whether the array has no content yet: zeros, or memory that a loop will fill."""
        return not self.sources(leaf)

    def is_gradient(self, leaf: Leaf) -> bool:
        """Whether the array is only moved, scaled and summed until the optimizer uses it."""
        return leaf in self._gradients

    @cached_property
    def _gradients(self) -> frozenset[Leaf]:
        """Return every computed array that flows only into a new weight or optimizer state.

        The search goes backwards from the results. The update begins, and the gradient ends, where
        a computed array is combined with weights or state.
        """
        entry = self.module.entry
        updated = [
            Leaf(entry.name, entry.root.name, index)
            for index, shape in enumerate(entry.root.shapes)
            if shape.elements > 1
        ]
        met: list[Leaf] = []
        for leaf in self._reached(updated):
            feeding = self._comes_from(leaf) or []
            if len(feeding) > 1:
                made_of = {operand: self.sources(operand) for operand in feeding}
                if any(kinds & STATE for kinds in made_of.values()):
                    met += [
                        operand for operand, kinds in made_of.items() if kinds == _ONLY_COMPUTED
                    ]
        return frozenset(self._reached(met))

    def _reached(self, leaves: Iterable[Leaf]) -> Iterator[Leaf]:
        """Return the given leaves and every array they come from without new computation."""
        waiting, seen = list(leaves), set[Leaf]()
        while waiting:
            leaf = waiting.pop()
            if leaf in seen:
                continue
            seen.add(leaf)
            yield leaf
            waiting += self._comes_from(leaf) or []

    def _kind(self, leaf: Leaf) -> frozenset[str]:
        """Return the kind of an array that comes from no other array."""
        instruction = self.flow.instruction(leaf)
        if instruction.opcode == "parameter" and leaf.computation == self.module.entry_name:
            category = self.categories.get(int(instruction.arguments))
            return frozenset((category or COMPUTED,))
        blank = instruction.opcode in _BLANK or instruction.custom_call_target in _BLANK_CALLS
        return frozenset() if blank or _keeps(instruction) else frozenset((COMPUTED,))

    def _comes_from(self, leaf: Leaf) -> list[Leaf] | None:
        """Return the arrays that an array consists of; None where it is computed or enters.

        Scalars, such as a scale or a learning rate, do not count.
        """
        if leaf not in self._known:
            self._known[leaf] = self._find(leaf)
        return self._known[leaf]

    @cached_property
    def _known(self) -> dict[Leaf, list[Leaf] | None]:
        return {}

    def _find(self, leaf: Leaf) -> list[Leaf] | None:
        handed_on = self.flow.handed_on_from(leaf)
        instruction = self.flow.instruction(leaf)
        if not handed_on and instruction.opcode == "fusion":
            handed_on = [
                Leaf(inner.name, inner.root.name, leaf.index)
                for inner in self.module.called_by(instruction)
            ]
        if not handed_on and _keeps(instruction):
            handed_on = self._operands(instruction, leaf)
        arrays = [operand for operand in handed_on if self._elements(operand) > 1]
        return arrays or None

    def _operands(self, instruction: Instruction, leaf: Leaf) -> list[Leaf]:
        operands = [Leaf(leaf.computation, name) for name in instruction.operands]
        opcode = instruction.opcode
        if opcode in _MOVES_FIRST:
            return operands[:1]
        if opcode == "select":
            return operands[1:]
        if opcode == "dynamic-update-slice":
            return operands[:2]
        if opcode.endswith("-done"):
            return self._result_of_start(operands[0], instruction.shapes[leaf.index])
        of_one = len(operands) == len(instruction.shapes) > 1
        return [operands[leaf.index]] if of_one and leaf.index < len(operands) else operands

    def _result_of_start(self, start: Leaf, shape: Shape) -> list[Leaf]:
        """Return the arrays of a started transfer: the one it reads and the one it writes."""
        listed = enumerate(self.flow.instruction(start).shapes)
        return [
            replace(start, index=at)
            for at, listed_shape in listed
            if listed_shape.dims == shape.dims
        ]

    def _elements(self, leaf: Leaf) -> int:
        shapes = self.flow.instruction(leaf).shapes
        return shapes[leaf.index].elements if leaf.index < len(shapes) else 0


def _keeps(instruction: Instruction) -> bool:
    """Whether the result consists of its operands, moved or combined element by element."""
    opcode = instruction.opcode
    return (
        opcode in _MOVES_FIRST
        or opcode in _COMBINES
        or opcode.startswith(_COLLECTIVES)
        or instruction.custom_call_target in _MOVING_CALLS
    )


# In the order in which a person reads them.
CATEGORIES: dict[str, str] = {
    "parameters": "the model's weights, between steps",
    "optimizer state": "what the optimizer keeps between steps",
    "cache": "what decoding keeps of the tokens before: keys and values, latents, states",
    "batch inputs": "the examples of one step",
    "arguments": "other arguments of the program",
    "gradients": "one for each weight",
    "activations": "kept from the forward pass for the backward pass",
    "weight copies": "weights gathered from other devices, cast, or laid out anew",
    "state copies": "optimizer state, cast or laid out anew",
    "temporaries": "intermediate results",
    "results": "results that reuse no argument",
    "unattributed": "no name tells what it is for",
    "constants and stack": "literals and the compiler's own small buffers",
    "padding": "bytes that layouts in tiles leave empty",
    "gaps": "holes and alignment between buffers when memory is fullest",
}
_PARAMETERS = re.compile(r"\.params\b|\['params'\]|\.parameters\b")
_OPTIMIZER = re.compile(r"\.opt_state\b|\['opt_state'\]|\.optimizer_state\b|\.mu\b|\.nu\b")
_CACHE = re.compile(r"\.cache\[")
_BACKWARD = "transpose("
_FORWARD = "jvp("
_COPIES = frozenset({"copy", "copy-start", "copy-done", "bitcast", "convert", "dynamic-slice"})
_HOPS = 8
_STACKING = ("dynamic_update_slice",)
_RESHAPING = ("broadcast_in_dim", "reshape", "squeeze", "while", "transpose")
_COPIED: dict[frozenset[str], str] = {
    frozenset(("parameters",)): "weight copies",
    frozenset(("optimizer state",)): "state copies",
}
_PASS_ON = frozenset({"get-tuple-element", "tuple", "bitcast", "while", "parameter", "call"})


def argument_category(name: str, *, is_training: bool) -> str:
    """Return the purpose of an argument, from its path in the caller's pytree."""
    if _OPTIMIZER.search(name):
        return "optimizer state"
    if _CACHE.search(name):
        return "cache"
    if _PARAMETERS.search(name):
        return "parameters"
    return "batch inputs" if is_training and not name.startswith("[0]") else "arguments"


def argument_categories(facts: ProgramFacts) -> dict[int, str]:
    """Return the purpose of each argument of a program, by number."""
    if facts.argument_purposes:
        return dict(enumerate(facts.argument_purposes))
    training = is_training_step(facts)
    return {
        number: argument_category(name, is_training=training)
        for number, name in enumerate(facts.argument_names)
    }


def is_training_step(facts: ProgramFacts) -> bool:
    """Whether the first argument is a state with weights and optimizer state."""
    if facts.argument_purposes:
        return {"parameters", "optimizer state"} <= set(facts.argument_purposes)
    own = [name for name in facts.argument_names if name.startswith("[0]")]
    return any(_PARAMETERS.search(name) for name in own) and any(map(_OPTIMIZER.search, own))


@dataclass(frozen=True)
class Attributor:
    """Finds the purpose of temporaries."""

    module: HloModule
    schedule: Schedule
    provenance: Provenance

    @cached_property
    def instructions(self) -> Mapping[str, Instruction]:
        """Every instruction of the program by name."""
        return {
            instruction.name: instruction
            for computation in self.module.computations.values()
            for instruction in computation
        }

    def speaker(self, tenancy: Tenancy, moment: int) -> Value:
        """Return the value that best describes the contents of a buffer at a moment.

        That is the last value computed by then. A value that a loop merely passes on does not
        count, and neither does memory that a loop has yet to fill; then the value it is filled with
        counts.
        """
        computed = [
            value
            for value in tenancy.values
            if not value.is_phi and self._opcode(value) not in _PASS_ON and not self._blank(value)
        ]
        by_then = [value for value in computed if self.schedule.ranges[value.key][0] <= moment]
        named = [value for value in by_then if self.op_name(value)]
        return (named or by_then or computed or list(tenancy.values))[-1]

    def op_name(self, value: Value) -> str:
        """Return a value's origin in the user's program; a copy has the origin of its source."""
        return self._name_of(value.instruction)

    def maker(self, value: Value) -> Instruction | None:
        """Return the instruction that best describes a value.

        A loop writes its results into a stack, where the written value says more than the write.
        """
        found = self.instructions.get(value.instruction)
        if found is None or not found.op_name.endswith(_STACKING):
            return found
        inside = list(self.module.nested(found))
        written = [self.instructions[name] for name in found.operands if name in self.instructions]
        endings = (*_STACKING, *_RESHAPING)
        for instruction in [*reversed(inside), *written]:
            name = instruction.op_name
            if _FORWARD in name and not name.endswith(endings):
                return instruction
        return found

    def category(self, tenancy: Tenancy, moment: int) -> str:
        """Return the purpose of a buffer at a moment."""
        value = self.speaker(tenancy, moment)
        name, leaf = self.op_name(value), self._leaf(value)
        made_of = frozenset[str]() if leaf is None else self.provenance.sources(leaf)
        if made_of in _COPIED:
            return _COPIED[made_of]
        if leaf is not None and self.provenance.is_gradient(leaf):
            return "gradients"
        if not name:
            return "unattributed"
        is_forward = _FORWARD in name and _BACKWARD not in name
        return "activations" if is_forward and self._ends_backward(tenancy) else "temporaries"

    def _ends_backward(self, tenancy: Tenancy) -> bool:
        """Whether the last user of a buffer is an operation of the backward pass."""
        order = self.schedule.instructions
        for index in range(min(tenancy.end, len(order) - 1), tenancy.start, -1):
            found = self.instructions.get(order[index])
            if found is not None and found.op_name:
                return _BACKWARD in found.op_name
        return False

    def _name_of(self, instruction: str) -> str:
        for _ in range(_HOPS):
            found = self.instructions.get(instruction)
            if found is None:
                return ""
            if found.op_name or found.opcode not in _COPIES or not found.operands:
                return found.op_name
            instruction = found.operands[0]
        return ""

    def _opcode(self, value: Value) -> str:
        found = self.instructions.get(value.instruction)
        return found.opcode if found else ""

    def _blank(self, value: Value) -> bool:
        leaf = self._leaf(value)
        return leaf is not None and self.provenance.is_blank(leaf)

    def _leaf(self, value: Value) -> Leaf | None:
        """Return the array of the program that a value of the listing corresponds to."""
        computation = self._home.get(value.instruction)
        indices = [int(index) for index in value.index.strip("{}").split(",") if index]
        if computation is None or len(indices) > 1:
            return None
        return Leaf(computation, value.instruction, *indices)

    @cached_property
    def _home(self) -> Mapping[str, str]:
        """Return the computation of each instruction."""
        return {
            instruction.name: computation.name
            for computation in self.module.computations.values()
            for instruction in computation
        }
