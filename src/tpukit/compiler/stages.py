"""The stages a program passes on its way to an executable, and how a caller hears of them."""

from collections.abc import Callable
from typing import Literal

# trace and lower run in the caller's process; the others in the child that holds libtpu.
Stage = Literal["trace", "lower", "compile", "memory", "schedule", "codegen"]
Until = Literal["memory", "schedule", "codegen"]
STAGES: tuple[Stage, ...] = ("trace", "lower", "compile", "memory", "schedule", "codegen")

Progress = Callable[[Stage], None]


def silent(stage: Stage) -> None:
    """A progress callback for callers that want none."""
