"""What arrays are made of: copies of weights, or gradients on their way to the optimizer.

Data is followed through the program, into loops and fusions and out of them. Moving, casting and
adding keep what an array is; a product, a reduction or a kernel makes something new.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..hlo import HloModule, Instruction, Shape
from ..hlo.dataflow import Dataflow, Leaf

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
    """What the arrays of one program are made of.

    Attributes:
        categories: What each argument of the program is for, by number.
    """

    module: HloModule
    categories: Mapping[int, str]

    @cached_property
    def flow(self) -> Dataflow:
        """The ways arrays take."""
        return Dataflow(self.module)

    def sources(self, leaf: Leaf) -> frozenset[str]:
        """What an array is made of: kinds of arguments, and `COMPUTED`; a blank one of nothing."""
        found: set[str] = set()
        for one in self._reached([leaf]):
            if self._comes_from(one) is None:
                found |= self._kind(one)
        return frozenset(found)

    def is_blank(self, leaf: Leaf) -> bool:
        """Whether it holds nothing yet: zeros, or memory that a loop will fill."""
        return not self.sources(leaf)

    def is_gradient(self, leaf: Leaf) -> bool:
        """Whether it is moved, scaled and added up until it meets what the optimizer updates."""
        return leaf in self._gradients

    @cached_property
    def _gradients(self) -> frozenset[Leaf]:
        """All that is only computed and flows into a new weight or a new optimizer state.

        From the results backwards: where what was computed is combined with weights or state,
        the update begins, and the gradient ends.
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
                made_of = {one: self.sources(one) for one in feeding}
                if any(kinds & STATE for kinds in made_of.values()):
                    met += [one for one, kinds in made_of.items() if kinds == _ONLY_COMPUTED]
        return frozenset(self._reached(met))

    def _reached(self, leaves: Iterable[Leaf]) -> Iterator[Leaf]:
        """Those leaves, and all that they are made of without being computed anew."""
        waiting, seen = list(leaves), set[Leaf]()
        while waiting:
            leaf = waiting.pop()
            if leaf in seen:
                continue
            seen.add(leaf)
            yield leaf
            waiting += self._comes_from(leaf) or []

    def _kind(self, leaf: Leaf) -> frozenset[str]:
        """What an array is that is made of no other."""
        instruction = self.flow.instruction(leaf)
        if instruction.opcode == "parameter" and leaf.computation == self.module.entry_name:
            category = self.categories.get(int(instruction.arguments))
            return frozenset((category or COMPUTED,))
        blank = instruction.opcode in _BLANK or instruction.custom_call_target in _BLANK_CALLS
        return frozenset() if blank or _keeps(instruction) else frozenset((COMPUTED,))

    def _comes_from(self, leaf: Leaf) -> list[Leaf] | None:
        """The arrays that it is made of; None where it begins or is computed anew.

        Numbers by themselves, such as a scale or a learning rate, are no part of an array.
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
        arrays = [one for one in handed_on if self._elements(one) > 1]
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
        """The arrays that a started transfer lists: what it reads beside what it writes."""
        listed = enumerate(self.flow.instruction(start).shapes)
        return [replace(start, index=at) for at, one in listed if one.dims == shape.dims]

    def _elements(self, leaf: Leaf) -> int:
        shapes = self.flow.instruction(leaf).shapes
        return shapes[leaf.index].elements if leaf.index < len(shapes) else 0


def _keeps(instruction: Instruction) -> bool:
    """Whether its result is what its operands are, moved or combined element by element."""
    opcode = instruction.opcode
    return (
        opcode in _MOVES_FIRST
        or opcode in _COMBINES
        or opcode.startswith(_COLLECTIVES)
        or instruction.custom_call_target in _MOVING_CALLS
    )
