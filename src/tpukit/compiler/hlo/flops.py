"""Count the floating-point operations of a program's matmuls, its loops and its operations."""

import re
from functools import lru_cache
from math import gcd

from .module import Computation, HloModule, Instruction
from .shape import reads_program

_INDEX = re.compile(r"index=(\d+)")


@reads_program
def trip_count(loop: Instruction, parent: Computation, module: HloModule) -> int | None:
    """Return the iterations of a `while` that counts between constants; else None.

    jax's scans and the compiler's own pipelined loops all count a tuple element up (or down) by a
    constant until it reaches a constant.
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
    """Return the program's loop without a constant end; None unless there is exactly one."""
    found = [
        instruction
        for instruction in module.entry
        if instruction.opcode == "while" and trip_count(instruction, module.entry, module) is None
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
    """Return the instruction that computes a value, looking through copies."""
    instruction = computation.by_name[name]
    for _ in computation:
        if instruction.opcode not in ("copy", "copy-done", "copy-start", "bitcast", "convert"):
            return instruction
        instruction = computation.by_name[instruction.operands[0]]
    raise ValueError(f"{name} is a copy of itself")


_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LARGEST_WINDOW = 1 << 24
_LABELS = re.compile(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)")


@reads_program
def matrix_flops(instruction: Instruction, computation: Computation) -> float:
    """Return the FLOPs of one `dot` or `convolution`; 0 for other instructions.

    The TPU compiler writes every matmul as a convolution, with batch dimensions as dilated spatial
    ones, so only window positions that meet an element count.
    """
    if instruction.opcode == "dot":
        left = computation.by_name[instruction.operands[0]].shapes[0]
        contracted = [int(d) for d in _numbers(instruction.attribute("lhs_contracting_dims"))]
        size = 1
        for dimension in contracted:
            size *= left.dims[dimension]
        return 2.0 * instruction.shapes[0].elements * size
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, computation)
    return 0.0


@reads_program
def nested_matrix_flops(instruction: Instruction, module: HloModule) -> float:
    """Return the FLOPs of an instruction and everything it calls, such as a fusion's."""
    return sum(
        matrix_flops(inner, computation)
        for computation in _computations_below(instruction, module)
        for inner in computation
    )


def _computations_below(instruction: Instruction, module: HloModule) -> list[Computation]:
    below: list[Computation] = []
    for computation in module.called_by(instruction):
        below.append(computation)
        for inner in computation:
            if inner.called:
                below.extend(_computations_below(inner, module))
    return below


def _convolution_flops(instruction: Instruction, computation: Computation) -> float:
    labels = _LABELS.search(instruction.attributes)
    if labels is None or len(instruction.operands) < 2:
        return 0.0
    left_labels, right_labels, out_labels = labels.groups()
    left = computation.by_name[instruction.operands[0]].shapes[0].dims
    right = computation.by_name[instruction.operands[1]].shapes[0].dims
    out = instruction.shapes[0].dims
    products = float(
        right[right_labels.index("i")] * out[out_labels.index("f")] * out[out_labels.index("b")]
    )
    window = _window(instruction.attributes)
    for spatial in range(len(out_labels) - 2):
        digit = str(spatial)
        settings = {
            name: (values[spatial] if spatial < len(values) else default)
            for name, (values, default) in window.items()
        }
        products *= _valid_positions(
            left[left_labels.index(digit)],
            out[out_labels.index(digit)],
            int(settings["size"]),
            stride=int(settings["stride"]),
            pad_low=int(settings["pad"].split("_")[0]),
            lhs_dilate=int(settings["lhs_dilate"]),
            rhs_dilate=int(settings["rhs_dilate"]),
        )
    return 2.0 * products


def _window(attributes: str) -> dict[str, tuple[list[str], str]]:
    """Return each setting of a window per spatial dimension, with defaults."""
    defaults = {"size": "1", "stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}
    found = _WINDOW.search(attributes)
    settings: dict[str, list[str]] = {}
    for part in found[1].split() if found else ():
        name, _, values = part.partition("=")
        settings[name] = values.split("x")
    return {name: (settings.get(name, []), default) for name, default in defaults.items()}


@lru_cache(maxsize=4096)
def _valid_positions(
    size_in: int,
    size_out: int,
    size_window: int,
    *,
    stride: int,
    pad_low: int,
    lhs_dilate: int,
    rhs_dilate: int,
) -> int:
    """Count the pairs of output and window positions that meet an input element."""
    if size_window > _LARGEST_WINDOW:
        raise ValueError(f"it has a window of {size_window}")
    last = (size_in - 1) * lhs_dilate
    shared = gcd(stride, lhs_dilate)
    period = lhs_dilate // shared  # every so many outputs meet an element, if one does
    count = 0
    for at in range(size_window):
        offset = at * rhs_dilate - pad_low
        lowest = max(0, -(offset // stride))
        highest = min(size_out - 1, (last - offset) // stride)
        if offset % shared or highest < lowest:
            continue
        first = -offset // shared * pow(stride // shared, -1, period) % period
        count += (highest - first) // period - (lowest - 1 - first) // period
    return count


def _numbers(text: str | None) -> list[str]:
    return [part for part in (text or "").split(",") if part]


_RUN_INSIDE = ("while", "conditional", "call")


@reads_program
def count_operations(module: HloModule) -> dict[str, int]:
    """Count the program's fusions, Pallas kernels, loops and copies; a loop's body counts once.

    A fusion is one operation of the schedule, so its contents are not counted.
    """
    counts: dict[str, int] = dict.fromkeys(("fusions", "kernels", "loops", "copies"), 0)

    def visit(computation: Computation) -> None:
        for instruction in computation:
            counts["fusions"] += instruction.opcode == "fusion"
            counts["kernels"] += instruction.is_kernel
            counts["loops"] += instruction.opcode == "while"
            counts["copies"] += instruction.opcode in ("copy", "copy-start")
            if instruction.opcode in _RUN_INSIDE:
                for called in module.called_by(instruction):
                    visit(called)

    visit(module.entry)
    return counts
