"""What each stretch of memory is for, told from argument names, operation names and data.

Nothing is guessed: a buffer that no rule speaks for is called unattributed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ..hlo import HloModule, Instruction
from ..hlo.dataflow import Leaf
from ..program.lowered import ProgramFacts
from .assignment import Value
from .liveness import Schedule, Tenancy
from .provenance import Provenance

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
    """What an argument is for, from its path in the caller's pytree."""
    if _OPTIMIZER.search(name):
        return "optimizer state"
    if _CACHE.search(name):
        return "cache"
    if _PARAMETERS.search(name):
        return "parameters"
    return "batch inputs" if is_training and not name.startswith("[0]") else "arguments"


def argument_categories(facts: ProgramFacts) -> dict[int, str]:
    """What each argument of a program is for, by number."""
    if facts.argument_purposes:
        return dict(enumerate(facts.argument_purposes))
    training = is_training_step(facts)
    return {
        number: argument_category(name, is_training=training)
        for number, name in enumerate(facts.argument_names)
    }


def is_training_step(facts: ProgramFacts) -> bool:
    """Whether the first argument is a state that holds weights and what an optimizer keeps."""
    if facts.argument_purposes:
        return {"parameters", "optimizer state"} <= set(facts.argument_purposes)
    own = [name for name in facts.argument_names if name.startswith("[0]")]
    return any(_PARAMETERS.search(name) for name in own) and any(map(_OPTIMIZER.search, own))


@dataclass(frozen=True)
class Attributor:
    """Names the purpose of temporaries."""

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
        """The value that says best what a buffer holds at a moment.

        That is the last one computed by then; what a loop merely hands on says nothing, and nor
        does memory that it has yet to fill: then what it fills it with does.
        """
        computed = [
            value
            for value in tenancy.values
            if not value.is_phi and self._opcode(value) not in _PASS_ON and not self._blank(value)
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

    def _blank(self, value: Value) -> bool:
        leaf = self._leaf(value)
        return leaf is not None and self.provenance.is_blank(leaf)

    def _leaf(self, value: Value) -> Leaf | None:
        """The array in the program's data that a value of the listing is."""
        computation = self._home.get(value.instruction)
        indices = [int(index) for index in value.index.strip("{}").split(",") if index]
        if computation is None or len(indices) > 1:
            return None
        return Leaf(computation, value.instruction, *indices)

    @cached_property
    def _home(self) -> Mapping[str, str]:
        """The computation that each instruction stands in."""
        return {
            instruction.name: computation.name
            for computation in self.module.computations.values()
            for instruction in computation
        }
