"""`ProgramFinding`: one observation about a captured program; `StepTimes`: times of its parts."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..compiler.compiled import CompiledStep
from ..compiler.hlo import Instruction
from ..compiler.memory.sources import parse_sources
from ..compiler.program_flops import RECOMPUTED
from ..compiler.timeline import StepPrediction, TrackSpan
from ..hardware.figure import bytes_text
from ..plain_data import JsonObject

_NAMED = 3


@dataclass(frozen=True)
class ProgramFinding:
    """One observation about a program, with evidence, cost and advice.

    Attributes:
        kind: "kernel", "float32 matmul", "attention scores", "host callback", "recompile", …
        evidence: The observation, with its place in the user's program.
        seconds: Predicted time per step; None if it takes no time of its own.
        advice: What to change; empty if nothing is wrong.
        size_bytes: HBM per device that it takes; None if it takes none.
    """

    kind: str
    evidence: str
    seconds: float | None = None
    advice: str = ""
    size_bytes: int | None = None

    def to_dict(self) -> JsonObject:
        """Return the finding as plain data."""
        seconds = {"value": self.seconds, "origin": "model"}
        size = {"value": self.size_bytes, "origin": "compiler"}
        return {
            **vars(self),
            "seconds": None if self.seconds is None else seconds,
            "size_bytes": None if self.size_bytes is None else size,
        }

    @property
    def text(self) -> str:
        """The finding as one line."""
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
    """Return the place in the user's program that an operation comes from."""
    return op_name.removeprefix("jit(call)/call_exported/")


@dataclass(frozen=True)
class StepTimes:
    """Times of a predicted step by instruction."""

    compiled: CompiledStep
    prediction: StepPrediction

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """Every instruction of the program by name."""
        computations = self.compiled.module.computations.values()
        return {one.name: one for computation in computations for one in computation}

    @cached_property
    def core_spans(self) -> tuple[TrackSpan, ...]:
        """Spans of the core, without loops."""
        spans = self.prediction.spans
        return tuple(span for span in spans if span.track == "core" and span.cause != "loop")

    def seconds(self, wanted: Callable[[TrackSpan], bool]) -> float:
        """Return the core time per step of the spans that `wanted` accepts."""
        return sum(span.duration_s * span.times for span in self.core_spans if wanted(span))

    @cached_property
    def _frames(self) -> Mapping[int, tuple[str, int, int]]:
        return parse_sources(self.compiled.hlo).frames

    def seconds_of_lines(self, lines: Collection[str]) -> float:
        """Return the core time of operations that come from source lines, such as "a.py:12"."""
        named: set[str] = set()
        for name, instruction in self.instructions.items():
            file, line, _ = self._frames.get(instruction.stack_frame or 0, ("", 0, 0))
            if f"{file}:{line}" in lines:
                named.add(name)
        return self.seconds(lambda span: span.name in named)

    @cached_property
    def recomputed_s(self) -> float:
        """Core time of recomputation by `jax.checkpoint`."""
        return self.seconds(lambda span: RECOMPUTED in span.op_name)

    @cached_property
    def recomputed_flops(self) -> float:
        """FLOPs per device of recomputation by `jax.checkpoint`."""
        again = (span for span in self.core_spans if RECOMPUTED in span.op_name)
        return sum(span.flops * span.times for span in again)
