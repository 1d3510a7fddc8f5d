"""Trace an array of a program to its origin through copies, tuples, loops and calls."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .module import Computation, HloModule, Instruction

_INDEX = re.compile(r"index=(\d+)")
# What gives its operand on as it is, in another place or layout at most.
_SAME = frozenset(
    (
        *("copy", "copy-start", "copy-done", "bitcast", "opt-barrier", "optimization-barrier"),
        *("domain", "add-dependency"),
    )
)


@dataclass(frozen=True)
class Leaf:
    """One array: an instruction's result, or one array of its tuple.

    Attributes:
        index: Index of the array in the tuple.
    """

    computation: str
    instruction: str
    index: int = 0


@dataclass(frozen=True)
class Dataflow:
    """The paths of arrays through a program."""

    module: HloModule

    def instruction(self, leaf: Leaf) -> Instruction:
        """The instruction whose result the array is."""
        return self.module.computations[leaf.computation].by_name[leaf.instruction]

    @cached_property
    def callers(self) -> dict[str, list[tuple[Instruction, Computation]]]:
        """The callers of each computation."""
        found: defaultdict[str, list[tuple[Instruction, Computation]]] = defaultdict(list)
        for computation in self.module.computations.values():
            for instruction in computation:
                for called in self.module.called_by(instruction):
                    found[called.name].append((instruction, computation))
        return found

    def handed_on_from(self, leaf: Leaf) -> list[Leaf]:
        """Return the arrays that this one equals; none where it is computed or is an argument.

        A loop's result is the loop's input, or its body's result; a parameter of the body is either
        as well.
        """
        instruction = self.instruction(leaf)
        computation = self.module.computations[leaf.computation]
        opcode = instruction.opcode
        if opcode in _SAME and instruction.operands:
            return self._operand(
                instruction, computation, 0, leaf.index if opcode == "opt-barrier" else 0
            )
        if opcode == "get-tuple-element":
            found = _INDEX.search(instruction.attributes)
            return self._operand(instruction, computation, 0, int(found[1])) if found else []
        if opcode == "tuple":
            return self._of_tuple(instruction, computation, leaf.index)
        if opcode == "while":
            body = self.module.computations[instruction.called["body"]]
            return [
                *self._operand(instruction, computation, 0, leaf.index),
                Leaf(body.name, body.root.name, leaf.index),
            ]
        if opcode in ("call", "conditional"):
            return [
                Leaf(c.name, c.root.name, leaf.index) for c in self.module.called_by(instruction)
            ]
        if opcode == "parameter":
            return list(self._arguments(instruction, computation, leaf.index))
        return []

    def beginnings(self, leaf: Leaf) -> list[Leaf]:
        """Return every array that this one may equal, where it is computed or enters."""
        seen: set[Leaf] = set()
        found: list[Leaf] = []
        waiting = [leaf]
        while waiting:
            one = waiting.pop()
            if one in seen:
                continue
            seen.add(one)
            before = self.handed_on_from(one)
            if before:
                waiting += before
            else:
                found.append(one)
        return found

    def _arguments(
        self, parameter: Instruction, computation: Computation, index: int
    ) -> Iterator[Leaf]:
        number = int(parameter.arguments)
        for caller, parent in self.callers.get(computation.name, ()):
            if caller.opcode == "while":
                yield from self._operand(caller, parent, 0, index)
                if caller.called.get("body") == computation.name:
                    yield Leaf(computation.name, computation.root.name, index)
            elif caller.opcode == "conditional":
                branch = self.module.called_by(caller).index(computation)
                yield from self._operand(caller, parent, 1 + branch, index)
            elif caller.opcode in ("call", "fusion") and number < len(caller.operands):
                yield from self._operand(caller, parent, number, index)

    def _operand(
        self, instruction: Instruction, computation: Computation, place: int, index: int
    ) -> list[Leaf]:
        if place >= len(instruction.operands):
            return []
        operand = computation.by_name.get(instruction.operands[place])
        if operand is None or index >= max(1, len(operand.shapes)):
            return []
        return [Leaf(computation.name, operand.name, index)]

    def _of_tuple(
        self, instruction: Instruction, computation: Computation, index: int
    ) -> list[Leaf]:
        """Return the operand that contains the array; an operand may itself be a tuple."""
        for name in instruction.operands:
            arrays = len(computation.by_name[name].shapes)
            if index < arrays:
                return [Leaf(computation.name, name, index)]
            index -= arrays
        return []
