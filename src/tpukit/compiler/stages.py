"""The stages a program passes on its way to an executable."""

from typing import Literal, cast, get_args

from ..errors import TPUValidationError, did_you_mean

# trace and lower run in the caller's process; the others in the child that holds libtpu.
Stage = Literal["trace", "lower", "compile", "memory", "schedule", "codegen"]
Until = Literal["memory", "schedule", "codegen"]
STAGES: tuple[Stage, ...] = ("trace", "lower", "compile", "memory", "schedule", "codegen")


def parse_until(text: str) -> Until:
    """The stage a user named as the last one wanted.

    Raises:
        TPUValidationError: There is none of that name.
    """
    known: tuple[str, ...] = get_args(Until)
    if text not in known:
        raise TPUValidationError(
            f"a compile cannot stop after {text!r}; use {', '.join(known)}."
            + did_you_mean(text, known)
        )
    return cast(Until, text)
