"""How many floating-point operations the matrix products of a program do, counted exactly."""

import re
from functools import lru_cache
from math import gcd

from .module import Computation, HloModule, Instruction
from .shape import reads_program

_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LARGEST_WINDOW = 1 << 24
_LABELS = re.compile(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)")


@reads_program
def matrix_flops(instruction: Instruction, computation: Computation) -> float:
    """Multiplications and additions of one `dot` or `convolution`; 0 for anything else.

    The TPU compiler writes every product as a convolution, batch dimensions as dilated spatial
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
    """The same for an instruction with all it calls (a fusion)."""
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
    """Each setting of a window, per spatial dimension, with its default."""
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
    """Pairs of (output, window) positions that meet an input element."""
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
