"""What a kernel's scalar instructions compute, as Python source, with values that may be unknown.

Numbers are signed 32-bit integers. Addresses are larger than any of them: each allocation and each
operand has a range of its own, so that adding an offset keeps an address inside it. A value the
compiler's listing does not determine (a float, a vector's element, a table nobody supplied) is
`UNKNOWN`, and what is computed from it is unknown too.
"""

import re
from typing import Any

from ...errors import XLACompilationError
from .listing import SlotInstruction


class Unknown:
    """The one value that is not known; it cannot be taken for true or false."""

    def __repr__(self) -> str:
        return "UNKNOWN"

    def __bool__(self) -> bool:
        raise XLACompilationError(
            "the kernel's control flow depends on a value that is not known here; "
            "pass the integers it prefetches (group sizes, mask tables) as concrete arguments."
        )


UNKNOWN = Unknown()
ADDRESS = 2**44  # every address is at least this, every number far below
_OPERAND = 2**76
_ALLOCATION = re.compile(r"#allocation(\d+)(_spill)?$")
_NUMBER = re.compile(r"\$?(0x[0-9a-f]+|-?\d+)$")
_VALUE = re.compile(r"[sp]\d+_[sp]\d+$")
_SIGNED = 2**31


def allocation_address(number: int, *, spill: bool = False) -> int:
    """Where an allocation starts; spilled values have allocations of their own."""
    return (2 * number + spill + 1) * ADDRESS


def operand_address(index: int) -> int:
    """Where an operand of the kernel starts."""
    return (index + 1) * _OPERAND


def operand_of(address: Any) -> int | None:
    """The operand an address lies in, if any."""
    return None if address is UNKNOWN or address < _OPERAND else address // _OPERAND - 1


def signed(value: int) -> int:
    """The 32-bit number a value wraps to."""
    return (value + _SIGNED) % (2 * _SIGNED) - _SIGNED


def add(a: Any, b: Any) -> Any:
    """A sum of numbers, or an address with an offset."""
    if a is UNKNOWN or b is UNKNOWN:
        return UNKNOWN
    total = a + b
    if -_SIGNED <= total < _SIGNED:
        return total
    if a >= ADDRESS or b >= ADDRESS:
        return UNKNOWN if a >= ADDRESS and b >= ADDRESS else total
    return signed(total)


def subtract(a: Any, b: Any) -> Any:
    """A difference of numbers, or of an address and an offset."""
    if a is UNKNOWN or b is UNKNOWN or b >= ADDRESS:
        return UNKNOWN
    return a - b if a >= ADDRESS else signed(a - b)


def multiply(a: Any, b: Any) -> Any:
    """A product; addresses have none."""
    if a is UNKNOWN or b is UNKNOWN or a >= ADDRESS or b >= ADDRESS:
        return 0 if (a is not UNKNOWN and a == 0) or (b is not UNKNOWN and b == 0) else UNKNOWN
    return signed(a * b)


def _shifted_address(a: int) -> Any:
    # Shifting an address changes its unit (bytes, words, granules), not what it points to; an
    # offset inside an allocation would be lost, so that one is not followed.
    return a if a >= _OPERAND or a % ADDRESS == 0 else UNKNOWN


def shift_left(a: Any, b: Any) -> Any:
    """Bits moved up."""
    if a is UNKNOWN or b is UNKNOWN or b >= ADDRESS:
        return UNKNOWN
    return _shifted_address(a) if a >= ADDRESS else signed(a << (b & 31))


def shift_right(a: Any, b: Any) -> Any:
    """Bits moved down, zeros from above."""
    if a is UNKNOWN or b is UNKNOWN or b >= ADDRESS:
        return UNKNOWN
    return _shifted_address(a) if a >= ADDRESS else signed((a & 0xFFFFFFFF) >> (b & 31))


def shift_right_signed(a: Any, b: Any) -> Any:
    """Bits moved down, the sign from above."""
    if a is UNKNOWN or b is UNKNOWN or b >= ADDRESS:
        return UNKNOWN
    return _shifted_address(a) if a >= ADDRESS else a >> (b & 31)


def _numbers_only(function: Any) -> Any:
    def checked(a: Any, b: Any) -> Any:
        if a is UNKNOWN or b is UNKNOWN or a >= ADDRESS or b >= ADDRESS:
            return UNKNOWN
        return function(a, b)

    return checked


def _unsigned(value: int) -> int:
    return value & 0xFFFFFFFF


def _divided(function: Any) -> Any:
    def checked(a: Any, b: Any) -> Any:
        if a is UNKNOWN or b is UNKNOWN or a >= ADDRESS or b >= ADDRESS or b == 0:
            return UNKNOWN
        return signed(function(_unsigned(a), _unsigned(b)))

    return checked


def choose(predicate: Any, yes: Any, no: Any) -> Any:
    """`yes` or `no`; unknown when it matters and the predicate is."""
    if predicate is UNKNOWN:
        return yes if yes is no else UNKNOWN
    return yes if predicate else no


def both(a: Any, b: Any) -> Any:
    """The conjunction of predicates."""
    if a is False or b is False:
        return False
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else True


def negate(a: Any) -> Any:
    """The negation of a predicate."""
    return UNKNOWN if a is UNKNOWN else not a


def either(a: Any, b: Any) -> Any:
    """The disjunction of predicates."""
    return negate(both(negate(a), negate(b)))


def differ(a: Any, b: Any) -> Any:
    """Exclusive or of predicates."""
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
    """Python source for an operand: a name, a number, or an address in brackets."""
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
    """Python source for the inside of an address, such as `#allocation6 + %s5_s2 + $0x1`."""
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
    """Python source for the value of an instruction that touches no memory."""
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
