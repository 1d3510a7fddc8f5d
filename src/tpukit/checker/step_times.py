"""Predicted time of parts of a captured step: by source line, and of what is recomputed."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..compiler.compiled import CompiledStep
from ..compiler.hlo import Instruction
from ..compiler.memory.sources import parse_sources
from ..compiler.program_flops import RECOMPUTED
from ..compiler.timeline import StepPrediction, TrackSpan


@dataclass(frozen=True)
class StepTimes:
    """The spans of a predicted step beside the instructions that they time."""

    compiled: CompiledStep
    prediction: StepPrediction

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """Every instruction of the program by name."""
        computations = self.compiled.module.computations.values()
        return {one.name: one for computation in computations for one in computation}

    @cached_property
    def core_spans(self) -> tuple[TrackSpan, ...]:
        """What the core does, loops themselves left out."""
        spans = self.prediction.spans
        return tuple(span for span in spans if span.track == "core" and span.cause != "loop")

    def seconds(self, wanted: Callable[[TrackSpan], bool]) -> float:
        """Return the core time of some spans, over the whole step."""
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
        """Core time of what `jax.checkpoint` computes a second time."""
        return self.seconds(lambda span: RECOMPUTED in span.op_name)

    @cached_property
    def recomputed_flops(self) -> float:
        """FLOPs on one device that `jax.checkpoint` computes a second time."""
        again = (span for span in self.core_spans if RECOMPUTED in span.op_name)
        return sum(span.flops * span.times for span in again)
