"""The answer to "does it fit, and how long is a step", as one object for every kind of report."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..compiler.compiled import CompiledStep
from ..compiler.memory import MemoryReport
from ..compiler.memory.view import memory_details, verdict_line
from ..shown import Shown
from .fixes import FixList
from .host_memory import HostMemory, captured_host_memory, host_memory

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..capturing.captured import Captured, CapturedProgram
    from ..compiler.timeline import StepPrediction
    from ..job.job import Job
    from .program_finding import ProgramFinding
    from .report import Report

FITS, DOES_NOT_FIT, COULD_NOT_TELL, WORSE = 0, 3, 4, 5


@dataclass(frozen=True)
class CheckResult(Shown):
    """What one check found.

    Attributes:
        compiled: The compile it rests on.
        job: The job that was checked; None for a bare function.
        prediction: Of the step time; None with `no_prediction` saying why.
        fixes: What could make it fit, where that was looked for.
        memory_only: Whether no step time was asked for.
        target: What was checked, as it was named: a preset, a file or a function.
        asked: What was set beside it, by key of a job; for a function also `arg` and `donate`.
        options: Compiler options that were set; by default those of the job.
        captured: The capture that the program comes from; None for a job.
        program: The captured program that was compiled; None for a job.
        calls: How often one step runs the program; 1 for a job.
        parts: The other programs of the same step, where a captured step has several.
        findings: What a captured program does that its author may not know.
    """

    compiled: CompiledStep
    job: "Job | None" = None
    prediction: "StepPrediction | None" = None
    no_prediction: str = ""
    fixes: FixList | None = None
    memory_only: bool = False
    target: str = ""
    asked: Mapping[str, Any] = field(default_factory=dict[str, Any])
    options: Mapping[str, Any] | None = None
    captured: "Captured | None" = None
    program: "CapturedProgram | None" = None
    calls: int = 1
    parts: "tuple[CheckResult, ...]" = ()
    findings: "tuple[ProgramFinding, ...]" = ()

    @property
    def fits(self) -> bool:
        """Whether the compiler accepted every program, and a job keeps to its own limits."""
        return self.compiled.fits and all(part.fits for part in self.parts)

    @property
    def step_time_s(self) -> float | None:
        """Predicted time of all programs of one step; None where one has no prediction."""
        times = [
            None if one.prediction is None else one.prediction.step_time_s * one.calls
            for one in (self, *self.parts)
        ]
        return None if None in times else sum(time for time in times if time is not None)

    @property
    def memory(self) -> MemoryReport:
        """Where the HBM of one device goes."""
        return self.compiled.memory

    @cached_property
    def host_memory(self) -> HostMemory | None:
        """What its hosts need of their memory; None for a bare function."""
        if self.captured is not None and self.program is not None:
            return captured_host_memory(self.captured, self.program, self.compiled)
        return None if self.job is None else host_memory(self.job, self.compiled)

    @property
    def exit_code(self) -> int:
        """0 when it fits, 3 when it does not."""
        return FITS if self.fits else DOES_NOT_FIT

    @property
    def next_command(self) -> str:
        """What to run next; "" when it is not known what was checked."""
        from .next_command import next_command

        return next_command(self)

    def to_report(self) -> "Report":
        """The data that pages, traces and comparisons are made from."""
        from .report import build_report

        return build_report(self, options=self.options, next_command=self.next_command)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data; `tpukit report` reads it back."""
        return dict(self.to_report())

    def details(self) -> "RenderableType":
        """Everything but the verdict, for a terminal that shows it already."""
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [memory_details(self.compiled.memory)]
        if self.job is None and self.compiled.unsplit:
            parts.append(Text(f"note: {self.compiled.unsplit}", style="yellow"))
        if self.host_memory is not None:
            parts += ["", self.host_memory]
        if self.prediction is not None:
            parts += ["", self.prediction]
        elif self.no_prediction:
            parts.append(Text(f"no step time: {self.no_prediction}", style="dim"))
        if self.captured is not None:
            from .capture_view import captured_lines

            parts += ["", *captured_lines(self)]
        if self.fixes is not None:
            aim = "what would leave more room" if self.compiled.fits else "what could make it fit"
            parts += ["", Text(aim, style="bold"), self.fixes]
        versions = ", ".join(f"{name} {number}" for name, number in self.compiled.versions.items())
        parts.append(Text(versions, style="dim"))
        if self.next_command:
            parts.append(Text(f"next: {self.next_command}", style="bold"))
        return Group(*parts)

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(verdict_line(self.compiled.memory), self.details())
