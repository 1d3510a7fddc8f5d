"""Translate a kernel's scalar instructions to Python source, with values that may be unknown.

Numbers are signed 32-bit integers. Addresses are larger than any number: each allocation and each
operand has its own range, so an address plus an offset stays inside its range. A value that the
listing does not determine (a float, a vector's element, a table that was not supplied) is
`UNKNOWN`, and so is everything computed from it.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ...errors import XLACompilationError
from ..hlo import Shape
from .listing import SlotInstruction


class Unknown:
    """The value that stands for anything unknown; it is neither true nor false."""

    def __repr__(self) -> str:
        return "UNKNOWN"

    def __bool__(self) -> bool:
        raise XLACompilationError(
            "the kernel's control flow depends on an unknown value; "
            "pass the integers it prefetches (group sizes, mask tables) as concrete arguments."
        )


UNKNOWN = Unknown()
ScalarValue: TypeAlias = Any
"""A number or an address (int), a predicate (bool), or UNKNOWN."""
ScalarFunction: TypeAlias = Callable[[ScalarValue, ScalarValue], ScalarValue]
ADDRESS = 2**44  # every address is at least this, every number far below
_OPERAND = 2**76
_ALLOCATION = re.compile(r"#allocation(\d+)(_spill)?$")
_NUMBER = re.compile(r"\$?(0x[0-9a-f]+|-?\d+)$")
_VALUE = re.compile(r"[sp]\d+_[sp]\d+$")
_SIGNED = 2**31


def allocation_address(number: int, *, spill: bool = False) -> int:
    """Return the start of an allocation; spilled values have their own allocations."""
    return (2 * number + spill + 1) * ADDRESS


def operand_address(index: int) -> int:
    """Return the start of an operand of the kernel."""
    return (index + 1) * _OPERAND


def operand_of(address: ScalarValue) -> int | None:
    """Return the operand that contains an address, if any."""
    return None if address is UNKNOWN or address < _OPERAND else address // _OPERAND - 1


def signed(value: int) -> int:
    """Wrap a value to a signed 32-bit number."""
    return (value + _SIGNED) % (2 * _SIGNED) - _SIGNED


def add(a: ScalarValue, b: ScalarValue) -> ScalarValue:
    """Add two numbers, or an offset to an address."""
    if a is UNKNOWN or b is UNKNOWN:
        return UNKNOWN
    total = a + b
    if -_SIGNED <= total < _SIGNED:
        return total
    if a >= ADDRESS or b >= ADDRESS:
        return UNKNOWN if a >= ADDRESS and b >= ADDRESS else total
    return signed(total)


def subtract(a: ScalarValue, b: ScalarValue) -> ScalarValue:
    """Subtract two numbers, or an offset from an address."""
    if a is UNKNOWN or b is UNKNOWN or b >= ADDRESS:
        return UNKNOWN
    return a - b if a >= ADDRESS else signed(a - b)


def multiply(a: ScalarValue, b: ScalarValue) -> ScalarValue:
    """Multiply two numbers; addresses cannot be multiplied."""
    if a is UNKNOWN or b is UNKNOWN or a >= ADDRESS or b >= ADDRESS:
        return 0 if (a is not UNKNOWN and a == 0) or (b is not UNKNOWN and b == 0) else UNKNOWN
    return signed(a * b)


def _shifted_address(a: int) -> ScalarValue:
    # Shifting an address changes its unit (bytes, words, granules), not what it points to; an
    # offset inside an allocation would be lost, so that one is not followed.
    return a if a >= _OPERAND or a % ADDRESS == 0 else UNKNOWN


def shift_left(a: ScalarValue, b: ScalarValue) -> ScalarValue:
    """Shift left."""
    if a is UNKNOWN or b is UNKNOWN or b >= ADDRESS:
        return UNKNOWN
    return _shifted_address(a) if a >= ADDRESS else signed(a << (b & 31))


def shift_right(a: ScalarValue, b: ScalarValue) -> ScalarValue:
    """Shift right, filling with zeros."""
    if a is UNKNOWN or b is UNKNOWN or b >= ADDRESS:
        return UNKNOWN
    return _shifted_address(a) if a >= ADDRESS else signed((a & 0xFFFFFFFF) >> (b & 31))


def shift_right_signed(a: ScalarValue, b: ScalarValue) -> ScalarValue:
    """Shift right, keeping the sign."""
    if a is UNKNOWN or b is UNKNOWN or b >= ADDRESS:
        return UNKNOWN
    return _shifted_address(a) if a >= ADDRESS else a >> (b & 31)


def _numbers_only(function: ScalarFunction) -> ScalarFunction:
    def checked(a: ScalarValue, b: ScalarValue) -> ScalarValue:
        if a is UNKNOWN or b is UNKNOWN or a >= ADDRESS or b >= ADDRESS:
            return UNKNOWN
        return function(a, b)

    return checked


def _unsigned(value: int) -> int:
    return value & 0xFFFFFFFF


def _divided(function: ScalarFunction) -> ScalarFunction:
    def checked(a: ScalarValue, b: ScalarValue) -> ScalarValue:
        if a is UNKNOWN or b is UNKNOWN or a >= ADDRESS or b >= ADDRESS or b == 0:
            return UNKNOWN
        return signed(function(_unsigned(a), _unsigned(b)))

    return checked


def choose(predicate: ScalarValue, yes: ScalarValue, no: ScalarValue) -> ScalarValue:
    """Return `yes` or `no`; unknown if they differ and the predicate is unknown."""
    if predicate is UNKNOWN:
        return yes if yes is no else UNKNOWN
    return yes if predicate else no


def both(a: ScalarValue, b: ScalarValue) -> ScalarValue:
    """Return the conjunction of predicates."""
    if a is False or b is False:
        return False
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else True


def negate(a: ScalarValue) -> ScalarValue:
    """Return the negation of a predicate."""
    return UNKNOWN if a is UNKNOWN else not a


def either(a: ScalarValue, b: ScalarValue) -> ScalarValue:
    """Return the disjunction of predicates."""
    return negate(both(negate(a), negate(b)))


def differ(a: ScalarValue, b: ScalarValue) -> ScalarValue:
    """Return the exclusive or of predicates."""
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else a != b


# How the source of `expression` reaches the functions; everything else computes in line.
NAMESPACE: dict[str, Any] = {
    "UNKNOWN": UNKNOWN,
    "add": add,
    "subtract": subtract,
    "multiply": multiply,
    "shift_left": shift_left,
    "shift_right": shift_right,
    "shift_right_signed": shift_right_signed,
    "choose": choose,
    "both": both,
    "either": either,
    "negate": negate,
    "differ": differ,
    "bit_and": _numbers_only(lambda a, b: a & b),
    "bit_or": _numbers_only(lambda a, b: a | b),
    "bit_xor": _numbers_only(lambda a, b: a ^ b),
    "least": _numbers_only(min),
    "most": _numbers_only(max),
    "least_unsigned": _numbers_only(lambda a, b: signed(min(_unsigned(a), _unsigned(b)))),
    "most_unsigned": _numbers_only(lambda a, b: signed(max(_unsigned(a), _unsigned(b)))),
    "quotient_unsigned": _divided(lambda a, b: a // b),
    "remainder_unsigned": _divided(lambda a, b: a % b),
    "eq": _numbers_only(lambda a, b: a == b),
    "ne": _numbers_only(lambda a, b: a != b),
    "lt": _numbers_only(lambda a, b: a < b),
    "le": _numbers_only(lambda a, b: a <= b),
    "gt": _numbers_only(lambda a, b: a > b),
    "ge": _numbers_only(lambda a, b: a >= b),
    "lt_unsigned": _numbers_only(lambda a, b: _unsigned(a) < _unsigned(b)),
    "le_unsigned": _numbers_only(lambda a, b: _unsigned(a) <= _unsigned(b)),
    "gt_unsigned": _numbers_only(lambda a, b: _unsigned(a) > _unsigned(b)),
    "ge_unsigned": _numbers_only(lambda a, b: _unsigned(a) >= _unsigned(b)),
}

_BINARY = {
    "sadd.s32": "add",
    "scalar_lea": "add",
    "ssub.s32": "subtract",
    "smul.u32": "multiply",
    "smul.s32": "multiply",
    "sshll.u32": "shift_left",
    "sshrl.u32": "shift_right",
    "sshra.s32": "shift_right_signed",
    "sand.u32": "bit_and",
    "sor.u32": "bit_or",
    "sxor.u32": "bit_xor",
    "smin.s32": "least",
    "smax.s32": "most",
    "smin.u32": "least_unsigned",
    "smax.u32": "most_unsigned",
    "sdivrem.u32.div": "quotient_unsigned",
    "sdivrem.u32.rem": "remainder_unsigned",
    "por": "either",
    "pand": "both",
    "pxor": "differ",
}
_COPIES = ("smov", "pmov", "int_to_ptr", "spop")
_COMPARISON = re.compile(r"scmp\.(eq|ne|lt|le|gt|ge)\.([su])32")


def value_source(text: str) -> str:
    """Return Python source for an operand: a name, a number, or an address in brackets."""
    text = text.strip()
    if text.startswith("!"):
        return f"negate({value_source(text[1:])})"
    if text.startswith("%"):
        return text[1:] if _VALUE.match(text[1:]) else "UNKNOWN"
    if text.startswith("[") and text.endswith("]"):
        return address_source(text[1:-1])
    number = _NUMBER.match(text)
    return repr(signed(int(number[1], 0))) if number else "UNKNOWN"


def address_source(text: str) -> str:
    """Return Python source for an address expression such as `#allocation6 + %s5_s2 + $0x1`."""
    source = ""
    for part in text.split("+"):
        allocation = _ALLOCATION.match(part.strip())
        term = (
            str(allocation_address(int(allocation[1]), spill=bool(allocation[2])))
            if allocation
            else value_source(part)
        )
        source = f"add({source},{term})" if source else term
    return source


def expression(instruction: SlotInstruction) -> str:
    """Return Python source for the value of an instruction that accesses no memory."""
    opcode, operands = instruction.opcode, instruction.operands
    stem = opcode.split(".")[0]
    if stem in _COPIES and len(operands) == 1:
        return value_source(operands[0])
    function = _BINARY.get(opcode) or _BINARY.get(stem)
    comparison = _COMPARISON.match(opcode)
    if comparison:
        order = comparison[1] not in ("eq", "ne")
        function = comparison[1] + ("_unsigned" if comparison[2] == "u" and order else "")
    values = [value_source(operand) for operand in operands]
    if function and len(values) == 2:
        return f"{function}({values[0]},{values[1]})"
    if opcode == "pneg" and len(values) == 1:
        return f"negate({values[0]})"
    if opcode in ("pnand", "pnor") and len(values) == 2:
        return f"negate({'both' if opcode == 'pnand' else 'either'}({values[0]},{values[1]}))"
    if opcode == "scalar_select" and len(values) == 3:
        return f"choose({values[0]},{values[1]},{values[2]})"
    return "UNKNOWN"


_WORD_BYTES = 4


def words_of(array: Any, shape: Shape) -> tuple[int, ...]:
    """Return the 32-bit words of an integer array in the layout of its compiled shape.

    A kernel's tables are copied from HBM to scalar memory unchanged, so one word may contain
    elements of several rows: `s8[8,4]{1,0:T(8,128)(4,1)}` has four rows in each word.

    Raises:
        XLACompilationError: The array has another shape, or elements smaller than a byte.
    """
    import numpy as np

    values: Any = np.asarray(array)
    if tuple(values.shape) != shape.dims:
        raise XLACompilationError(
            f"a kernel's table has shape {tuple(values.shape)}, but {shape.dims} in the compiled "
            "program; trace and compile the same arguments."
        )
    if values.dtype == np.bool_:
        values = values.astype(np.int32 if shape.dtype != "pred" else np.int8)
    if values.dtype.kind not in "iu" or values.dtype.itemsize > _WORD_BYTES:
        raise XLACompilationError(
            f"a kernel's table contains {values.dtype}, but only integers of 8 to 32 bits are "
            "supported."
        )
    order = shape.layout or tuple(range(values.ndim - 1, -1, -1))
    values = values.transpose(tuple(reversed(order)))
    for tile in shape.tiles:
        values = _tiled(values, tile)
    data = values.tobytes()
    data += bytes(-len(data) % _WORD_BYTES)
    return tuple(np.frombuffer(data, np.int32).tolist())


def _tiled(values: Any, tile: Sequence[int]) -> Any:
    """Split the last dimensions into tiles, which become the new last dimensions."""
    import numpy as np

    missing = len(tile) - values.ndim
    if missing > 0:
        values = values.reshape((1,) * missing + values.shape)
    lead = values.ndim - len(tile)
    padding = [(0, 0)] * lead + [
        (0, -size % edge) for size, edge in zip(values.shape[lead:], tile, strict=True)
    ]
    values = np.pad(values, padding)
    cut: list[int] = list(values.shape[:lead])
    for size, edge in zip(values.shape[lead:], tile, strict=True):
        cut += [size // edge, edge]
    split = range(lead, lead + 2 * len(tile))
    axes = [*range(lead), *split[::2], *split[1::2]]
    assert math.prod(cut) == values.size
    return values.reshape(cut).transpose(axes)
