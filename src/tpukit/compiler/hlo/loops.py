"""How often a loop runs, read from its condition and its first value."""

import re

from .module import Computation, HloModule, Instruction
from .shape import reads_program

_INDEX = re.compile(r"index=(\d+)")


@reads_program
def trip_count(loop: Instruction, parent: Computation, module: HloModule) -> int | None:
    """Iterations of a `while` that counts from a constant to a constant; None if it does not.

    jax's scans and the compiler's own pipelined loops all count a tuple element upwards (or
    downwards) by a constant until it meets a constant.
    """
    condition = module.computations[loop.called["condition"]]
    body = module.computations[loop.called["body"]]
    compare = condition.root
    if compare.opcode != "compare" or len(compare.operands) != 2:
        return None
    left, right = (condition.by_name[name] for name in compare.operands)
    direction = compare.attribute("direction")
    index, limit = _counter_index(left), _constant(right)
    if index is None:  # the constant may stand on the left
        index, limit = _counter_index(right), _constant(left)
        direction = {"GT": "LT", "GE": "LE", "LT": "GT", "LE": "GE"}.get(direction or "", direction)
    if index is None or limit is None:
        return None
    start = _initial_value(loop, index, parent)
    step = _step(body, index)
    if start is None or not step:
        return None
    span = {"LT": limit - start, "LE": limit - start + 1, "NE": limit - start}
    down = {"GT": start - limit, "GE": start - limit + 1}
    if direction in span and step > 0:
        return max(0, -(-span[direction] // step))
    if direction in down and step < 0:
        return max(0, -(-down[direction] // -step))
    return None


def open_loop(module: HloModule) -> Instruction | None:
    """The program's own loop that no constant ends; None where there is not exactly one."""
    found = [
        one
        for one in module.entry
        if one.opcode == "while" and trip_count(one, module.entry, module) is None
    ]
    return found[0] if len(found) == 1 else None


def _counter_index(instruction: Instruction) -> int | None:
    found = _INDEX.search(instruction.attributes)
    return int(found[1]) if instruction.opcode == "get-tuple-element" and found else None


def _constant(instruction: Instruction) -> int | None:
    text = instruction.arguments.strip()
    is_whole = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", text)
    return int(text) if is_whole else None


def _initial_value(loop: Instruction, index: int, parent: Computation) -> int | None:
    state = parent.by_name[loop.operands[0]]
    if state.opcode != "tuple" or index >= len(state.operands):
        return None
    return _constant(_origin(state.operands[index], parent))


def _step(body: Computation, index: int) -> int | None:
    root = body.root
    if root.opcode != "tuple" or index >= len(root.operands):
        return None
    update = _origin(root.operands[index], body)
    if update.opcode not in ("add", "subtract") or len(update.operands) != 2:
        return None
    left, right = (_origin(name, body) for name in update.operands)
    for constant, counter in ((right, left), (left, right)):
        value = _constant(constant)
        if value is not None and _counter_index(counter) == index:
            return value if update.opcode == "add" else -value
    return None


def _origin(name: str, computation: Computation) -> Instruction:
    """The instruction a value comes from, seen through copies."""
    instruction = computation.by_name[name]
    for _ in computation:
        if instruction.opcode not in ("copy", "copy-done", "copy-start", "bitcast", "convert"):
            return instruction
        instruction = computation.by_name[instruction.operands[0]]
    raise ValueError(f"{name} is a copy of itself")
