"""What each stretch of memory is for, told from argument names, operation names and shapes.

Nothing is guessed: a buffer that no rule speaks for is called unattributed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..hlo import HloModule, Instruction, Shape
from ..program.facts import ProgramFacts
from .assignment import Allocation, Value
from .liveness import Schedule, Tenancy

# In the order in which a person reads them.
CATEGORIES: dict[str, str] = {
    "parameters": "the model's weights, between steps",
    "optimizer state": "what the optimizer keeps between steps",
    "batch inputs": "the examples of one step",
    "arguments": "other arguments of the program",
    "gradients": "one for each weight",
    "activations": "kept from the forward pass for the backward pass",
    "weight copies": "weights gathered from other devices or cast to the computing format",
    "temporaries": "intermediate results",
    "results": "results that reuse no argument",
    "unattributed": "no name tells what it is for",
    "constants and stack": "literals and the compiler's own small buffers",
    "padding": "bytes that layouts in tiles leave empty",
    "gaps": "holes and alignment between buffers when memory is fullest",
}
_PARAMETERS = re.compile(r"\.params\b|\['params'\]|\.parameters\b")
_OPTIMIZER = re.compile(r"\.opt_state\b|\['opt_state'\]|\.optimizer_state\b|\.mu\b|\.nu\b")
_BACKWARD = "transpose("
_FORWARD = "jvp("
# A product has the shape of a weight by chance, never because it is one.
_PRODUCTS = ("dot_general", "conv_general_dilated")
_COPIES = frozenset({"copy", "copy-start", "copy-done", "bitcast", "convert", "dynamic-slice"})
_HOPS = 8
_STACKING = ("dynamic_update_slice",)
_RESHAPING = ("broadcast_in_dim", "reshape", "squeeze", "while", "transpose")
_PASS_ON = frozenset({"get-tuple-element", "tuple", "bitcast", "while", "parameter", "call"})


def argument_category(name: str, *, is_training: bool) -> str:
    """What an argument is for, from its path in the caller's pytree."""
    if _OPTIMIZER.search(name):
        return "optimizer state"
    if _PARAMETERS.search(name):
        return "parameters"
    return "batch inputs" if is_training and not name.startswith("[0]") else "arguments"


def is_training_step(facts: ProgramFacts) -> bool:
    """Whether the first argument is a state that holds weights and what an optimizer keeps."""
    own = [name for name in facts.argument_names if name.startswith("[0]")]
    return any(_PARAMETERS.search(name) for name in own) and any(map(_OPTIMIZER.search, own))


@dataclass(frozen=True)
class Attributor:
    """Names the purpose of temporaries.

    Attributes:
        weights: Local shapes of the weights, with the number of devices each is split over.
    """

    module: HloModule
    schedule: Schedule
    weights: Sequence[tuple[tuple[int, ...], int]]

    @cached_property
    def instructions(self) -> Mapping[str, Instruction]:
        """Every instruction of the program by name."""
        return {
            instruction.name: instruction
            for computation in self.module.computations.values()
            for instruction in computation
        }

    def speaker(self, tenancy: Tenancy, moment: int) -> Value:
        """The value that says best what a buffer holds at a moment.

        That is the last one computed by then; what a loop merely hands on says nothing.
        """
        computed = [
            value
            for value in tenancy.values
            if not value.is_phi and self._opcode(value) not in _PASS_ON
        ]
        by_then = [one for one in computed if self.schedule.ranges[one.key][0] <= moment]
        named = [one for one in by_then if self.op_name(one)]
        return (named or by_then or computed or list(tenancy.values))[-1]

    def op_name(self, value: Value) -> str:
        """Where a value comes from in the user's program; a copy comes from what it copies."""
        return self._name_of(value.instruction)

    def maker(self, value: Value) -> Instruction | None:
        """The instruction that says what a value is.

        A loop writes its results into a stack: what is written says more than the writing.
        """
        found = self.instructions.get(value.instruction)
        if found is None or not found.op_name.endswith(_STACKING):
            return found
        inside = list(self.module.nested(found))
        written = [self.instructions[name] for name in found.operands if name in self.instructions]
        for one in [*reversed(inside), *written]:
            if _FORWARD in one.op_name and not one.op_name.endswith((*_STACKING, *_RESHAPING)):
                return one
        return found

    def category(self, tenancy: Tenancy, moment: int) -> str:
        """What the buffer is for at a moment."""
        value = self.speaker(tenancy, moment)
        name, opcode = self.op_name(value), self._opcode(value)
        if value.shape is not None and self._looks_like_a_weight(value.shape):
            if opcode.startswith("all-gather"):
                return "weight copies"
            if _BACKWARD in name:
                return "gradients"
            if not name.endswith(_PRODUCTS):
                return "weight copies"
        if not name:
            return "unattributed"
        is_forward = _FORWARD in name and _BACKWARD not in name
        return "activations" if is_forward and self._ends_backward(tenancy) else "temporaries"

    def _ends_backward(self, tenancy: Tenancy) -> bool:
        """Whether the last to use a buffer is an operation of the backward pass."""
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

    def _looks_like_a_weight(self, shape: Shape) -> bool:
        """Whether it has the shape of a weight, of one layer of it, or of its gathered whole."""
        own = sorted(size for size in shape.dims if size > 1)
        return len(own) > 1 and own in self._weight_shapes  # a vector may be anything

    @cached_property
    def _weight_shapes(self) -> list[list[int]]:
        found: list[list[int]] = []
        for dims, ways in self.weights:
            whole = [size for size in dims if size > 1]
            for local in (whole, whole[1:]):
                found.append(sorted(local))
                for index in range(len(local)):
                    gathered = [*local]
                    gathered[index] *= ways
                    found.append(sorted(gathered))
        return [shape for shape in found if len(shape) > 1 and prod(shape)]


def weight_shapes(
    allocations: Sequence[Allocation], facts: ProgramFacts
) -> list[tuple[tuple[int, ...], int]]:
    """Local shape of each weight, and over how many devices it is split."""
    training = is_training_step(facts)
    devices = prod(size for _, size in facts.mesh_axes)
    found: list[tuple[tuple[int, ...], int]] = []
    for one in allocations:
        if one.parameter is None or one.parameter >= len(facts.argument_names):
            continue
        name = facts.argument_names[one.parameter]
        shape = one.values[0].shape if one.values else None
        if shape and argument_category(name, is_training=training) == "parameters":
            found.append((shape.dims, devices // facts.argument_copies[one.parameter]))
    return found
