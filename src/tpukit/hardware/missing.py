"""`Missing`: stands for a measured figure that does not exist; shown as a dash, with a reason."""

from typing import TypeAlias

from ..errors import TPUNotAvailableError

DASH = "–"


class Missing:
    """Replaces a number, so that code which prints or compares numbers keeps working.

    It formats as a dash under any format spec, is falsy, and is neither above nor below any
    number, so it crosses no threshold. Arithmetic with it returns it. Only `float(x)` raises an
    error, which states the reason.

    Example:
        >>> power = Missing("no NVIDIA driver")
        >>> f"{power:.1f} W", bool(power), power > 100, power.reason
        ('– W', False, False, 'no NVIDIA driver')
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def to_dict(self) -> None:
        """Return None, which JSON writes as null."""

    def __format__(self, spec: str) -> str:
        return DASH

    def __str__(self) -> str:
        return DASH

    def __repr__(self) -> str:
        return f"Missing({self.reason!r})"

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Missing) and other.reason == self.reason

    def __hash__(self) -> int:
        return hash((Missing, self.reason))

    def __lt__(self, other: object) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __lt__

    def __add__(self, other: object) -> "Missing":
        return self

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__

    def __float__(self) -> float:
        raise TPUNotAvailableError(f"the figure is missing: {self.reason}")

    __int__ = __index__ = __float__  # pyright: ignore[reportAssignmentType]  neither returns


# A number, or the reason why there is none.
Measured: TypeAlias = float | Missing


def plain(value: "Measured") -> float | None:
    """Return the number, or None for a missing one, as JSON has it."""
    return None if isinstance(value, Missing) else value
