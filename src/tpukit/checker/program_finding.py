"""One thing that a captured program does, with evidence, cost and the way out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..hardware.figure import bytes_text

_NAMED = 3


@dataclass(frozen=True)
class ProgramFinding:
    """One thing that a program does.

    Attributes:
        kind: "kernel", "float32 matmul", "attention scores", "host callback", "recompile", …
        evidence: What was seen, with its place in the user's program.
        seconds: Predicted time per step; None where no time belongs to it.
        advice: The way out; empty where nothing is wrong.
        size_bytes: HBM per device that it costs; None where it costs none.
    """

    kind: str
    evidence: str
    seconds: float | None = None
    advice: str = ""
    size_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        seconds = {"value": self.seconds, "origin": "model"}
        size = {"value": self.size_bytes, "origin": "compiler"}
        return {
            **vars(self),
            "seconds": None if self.seconds is None else seconds,
            "size_bytes": None if self.size_bytes is None else size,
        }

    @property
    def text(self) -> str:
        """One line for a person."""
        costs: list[str] = []
        if self.seconds is not None:
            costs.append(f"{self.seconds * 1e3:.3g} ms per step, model")
        if self.size_bytes is not None:
            costs.append(f"{bytes_text(self.size_bytes)} of HBM, compiler")
        cost = f" ({'; '.join(costs)})" if costs else ""
        return f"{self.kind}: {self.evidence}{cost}" + (f"; {self.advice}" if self.advice else "")


def some_names(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many others there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def place_in_program(op_name: str) -> str:
    """Return where in the user's program an operation comes from, without the export around it."""
    return op_name.removeprefix("jit(call)/call_exported/")
