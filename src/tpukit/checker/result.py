"""`CheckResult`: whether a program fits and how long a step takes, for every kind of report."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..compiler.compiled import CompiledStep
from ..compiler.memory import MemoryReport
from ..compiler.memory.view import memory_details, verdict_line
from ..exit_codes import ExitCode
from ..plain_data import JsonMapping, JsonObject
from ..shown import Renderable, Shown
from .fix import FixList
from .host_memory import HostMemory, captured_host_memory, host_memory

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..capturing.captured import Captured, CapturedProgram
    from ..compiler.timeline import StepPrediction
    from ..job.job import Job
    from .program_finding import ProgramFinding
    from .report import Report


@dataclass(frozen=True)
class CheckResult(Shown):
    """The result of one check.

    Attributes:
        compiled: The compiled program.
        job: The job that was checked; None for a bare function.
        prediction: The predicted step; None with a reason in `no_prediction`.
        fixes: Changes that reduce memory; None if none were searched.
        memory_only: Whether the check stopped after the memory report.
        target: The preset, file or function that was checked, as it was typed.
        asked: Options that were typed, by key of a job; for a function also `arg` and `donate`.
        options: Compiler options that were set; by default those of the job.
        captured: The capture that the program comes from; None for a job.
        program: The captured program that was compiled; None for a job.
        calls: How often one step runs the program; 1 for a job.
        parts: The other programs of the same captured step.
        findings: Observations about a captured program.
    """

    compiled: CompiledStep
    job: "Job | None" = None
    prediction: "StepPrediction | None" = None
    no_prediction: str = ""
    fixes: FixList | None = None
    memory_only: bool = False
    target: str = ""
    asked: JsonMapping = field(default_factory=JsonObject)
    options: JsonMapping | None = None
    captured: "Captured | None" = None
    program: "CapturedProgram | None" = None
    calls: int = 1
    parts: "tuple[CheckResult, ...]" = ()
    findings: "tuple[ProgramFinding, ...]" = ()

    @property
    def fits(self) -> bool:
        """Whether every program fits, within the job's own limits."""
        return self.compiled.fits and all(part.fits for part in self.parts)

    @property
    def step_time_s(self) -> float | None:
        """Predicted time of all programs of one step; None if one has no prediction."""
        times = [
            None if one.prediction is None else one.prediction.step_time_s * one.calls
            for one in (self, *self.parts)
        ]
        return None if None in times else sum(time for time in times if time is not None)

    @property
    def memory(self) -> MemoryReport:
        """The memory report of one device."""
        return self.compiled.memory

    @cached_property
    def host_memory(self) -> HostMemory | None:
        """The memory that hosts need; None for a bare function."""
        if self.captured is not None and self.program is not None:
            return captured_host_memory(self.captured, self.program, self.compiled)
        return None if self.job is None else host_memory(self.job, self.compiled)

    @property
    def exit_code(self) -> int:
        """0 if it fits, otherwise 3."""
        return ExitCode.DONE if self.fits else ExitCode.DOES_NOT_FIT

    @property
    def next_command(self) -> str:
        """The command to run next; "" if the target is unknown."""
        from .next_command import next_command

        return next_command(self)

    def to_report(self) -> "Report":
        """Return the data that pages, traces and comparisons are made from."""
        from .report import build_report

        return build_report(self, options=self.options, next_command=self.next_command)

    def to_dict(self) -> JsonObject:
        """Return the report as plain data, which `tpukit report` reads."""
        return dict(self.to_report())

    def details(self) -> "RenderableType":
        """Return everything but the verdict, for a terminal that shows the verdict already."""
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
            from .capture_report import captured_lines

            parts += ["", *captured_lines(self)]
        if self.fixes is not None:
            aim = "what would leave more room" if self.compiled.fits else "what could make it fit"
            parts += ["", Text(aim, style="bold"), self.fixes]
        versions = ", ".join(f"{name} {number}" for name, number in self.compiled.versions.items())
        parts.append(Text(versions, style="dim"))
        if self.next_command:
            parts.append(Text(f"next: {self.next_command}", style="bold"))
        return Group(*parts)

    def __rich__(self) -> Renderable:
        from rich.console import Group

        return Group(verdict_line(self.compiled.memory), self.details())
