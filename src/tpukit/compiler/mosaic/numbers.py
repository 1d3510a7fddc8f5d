"""Whole numbers of a kernel at many points of its grid at once.

What decides how often a product runs are whole numbers: positions on the grid, bounds of loops,
comparisons. Each is an array with one entry for every point.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class UnknownNumber:
    """A number that only the running program knows, such as one it loads from memory."""

    source: str


Value: TypeAlias = Numbers | UnknownNumber


def _quotient(a: Numbers, b: Numbers) -> Numbers:
    """Rounded towards zero, as processors do."""
    b = np.where(b == 0, 1, b)
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


_COMPARISONS: tuple[Callable[[Any, Any], Any], ...] = (
    *(np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal),
    # Unsigned ones: what they compare are sizes and positions, which are not negative.
    *(np.less, np.less_equal, np.greater, np.greater_equal),
)
_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.divsi": _quotient,
    "arith.divui": _quotient,
    "arith.floordivsi": lambda a, b: a // np.where(b == 0, 1, b),
    "arith.ceildivsi": lambda a, b: -(-a // np.where(b == 0, 1, b)),
    "arith.remsi": lambda a, b: a - _quotient(a, b) * b,
    "arith.remui": lambda a, b: a - _quotient(a, b) * b,
    "arith.minsi": np.minimum,
    "arith.minui": np.minimum,
    "arith.maxsi": np.maximum,
    "arith.maxui": np.maximum,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.shli": np.left_shift,
    "arith.shrsi": np.right_shift,
    "arith.shrui": np.right_shift,
}
_SAME = frozenset(
    (
        *("arith.extui", "arith.extsi", "arith.trunci", "arith.index_cast", "arith.index_castui"),
        "tpu.assume_multiple",
    )
)


def evaluate(name: str, operands: list[Value], number: int | None) -> Value:
    """The result of one operation on whole numbers."""
    if name == "arith.constant" and number is not None:
        return np.array([number], dtype=np.int64)
    unknown = next((one for one in operands if isinstance(one, UnknownNumber)), None)
    if unknown is not None:
        return unknown
    known: list[Any] = list(operands)
    if name in _SAME and len(known) == 1:
        return known[0]
    if name in _BINARY and len(known) == 2:
        return _BINARY[name](*known)
    if name == "arith.cmpi" and number is not None and number < len(_COMPARISONS):
        return _COMPARISONS[number](*known).astype(np.int64)
    if name == "arith.select" and len(known) == 3:
        return np.where(known[0] != 0, known[1], known[2])
    return UnknownNumber(name)
