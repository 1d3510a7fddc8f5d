"""The levels of optimisation, each the one before and more."""

from dataclasses import dataclass
from typing import Literal, get_args

from ...errors import TPUValidationError, did_you_mean

LevelName = Literal["conservative", "balanced", "aggressive"]
Scope = Literal["linear", "all"]


@dataclass(frozen=True)
class Level:
    """What a level does.

    Attributes:
        name: What document 002 calls it.
        narrow: What computes in bfloat16: the products of `nn.Linear`, or everything.
        checkpoints: Whether the backward pass computes layers again instead of keeping them.
        fuses: Whether attention and norms written by hand go to our kernels.
        donates: Whether a call without gradients may reuse the memory of its inputs.
        tolerance: How far outputs may be from the original's, relative to the largest of them.
    """

    name: LevelName
    narrow: Scope
    checkpoints: bool
    fuses: bool
    donates: bool
    tolerance: float


# bfloat16 keeps 8 bits: one rounding is 0.4 %, and the errors of layers add up.
LEVELS: dict[str, Level] = {
    one.name: one
    for one in (
        Level("conservative", "linear", False, False, False, tolerance=0.02),
        Level("balanced", "linear", True, True, False, tolerance=0.02),
        Level("aggressive", "all", True, True, True, tolerance=0.05),
    )
}


def find_level(name: str) -> Level:
    """Return a level by its name.

    Raises:
        TPUValidationError: There is none of that name.
    """
    if name not in LEVELS:
        raise TPUValidationError(
            f"optimization_level={name!r} is not one of {', '.join(get_args(LevelName))}."
            + did_you_mean(str(name), LEVELS)
        )
    return LEVELS[name]
