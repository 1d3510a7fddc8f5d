"""`RehearsalResult`: the results of all stages, as text, data and page."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from ..exit_codes import ExitCode
from ..hardware.figure import seconds_text
from ..job.job import Job
from ..plain_data import JsonObject
from ..runtime.files import write_json, write_text
from ..runtime.versions import installed_versions
from ..shown import Renderable, Shown
from .stage import Beside, Moment, Played, StageResult, figure_text
from .stages.check import Check
from .stand_in import StandIn

SCHEMA = "tpukit.rehearsal/1"
RESULT, PAGE = "rehearsal.json", "report.html"
MARKS = {"passed": "✓", "failed": "✗", "left out": "–"}
_STYLES = {"passed": "green", "failed": "red", "left out": "dim"}
Found = TypeVar("Found", bound=StageResult)


@dataclass(frozen=True, kw_only=True)
class RehearsalResult(Shown):
    """The result of a rehearsal.

    Attributes:
        job: As it was given.
        stand_in: The job that was trained on this machine.
        played: The stages.
        moments: Events of the runs, in order.
        began: Unix seconds.
        seconds: Wall time.
        emulated: The emulated cloud as text.
        folder: The output folder.
    """

    job: Job
    stand_in: StandIn
    played: tuple[Played, ...]
    moments: tuple[Moment, ...]
    began: float
    seconds: float
    emulated: str
    folder: Path

    @property
    def is_good(self) -> bool:
        """Whether no stage failed."""
        return all(stage.verdict != "failed" for stage in self.played)

    @property
    def change(self) -> str:
        """The change that makes the job fit, as a line of YAML; "" where it fits unchanged."""
        checked = self.find(Check)
        refused = None if checked is None else checked.refused
        if refused is None or refused.fix is None or refused.job != self.job:
            return ""
        return refused.fix.text

    @property
    def exit_code(self) -> int:
        """0, or 1 where a stage failed."""
        return ExitCode.DONE if self.is_good else ExitCode.FAILED

    @property
    def passed_words(self) -> str:
        """The number of stages that passed and that were left out, as text."""
        left_out = sum(stage.verdict == "left out" for stage in self.played)
        if not left_out:
            return "all stages passed"
        return f"{len(self.played) - left_out} stages passed, {left_out} left out"

    @property
    def processor_s(self) -> float:
        """CPU seconds of all stages."""
        return sum(stage.processor_s for stage in self.played)

    @property
    def page(self) -> Path:
        """Path of the report."""
        return self.folder / PAGE

    @property
    def beside(self) -> list[Beside]:
        """Predicted beside measured figures, comparable ones first."""
        pairs = [pair for stage in self.played for pair in stage.beside()]
        return sorted(pairs, key=lambda pair: not pair.is_comparable)

    def find(self, kind: type[Found]) -> Found | None:
        """Return the result of a stage; None where it did not finish."""
        findings = (stage.finding for stage in self.played)
        return next((finding for finding in findings if isinstance(finding, kind)), None)

    def write(self, folder: Path) -> None:
        """Write the page and the JSON."""
        from .page import render_page

        write_text(folder / PAGE, render_page(self))
        write_json(folder / RESULT, self.to_dict())

    def to_dict(self) -> JsonObject:
        """Return the result as plain data."""
        return {
            "schema": SCHEMA,
            "good": self.is_good,
            "change": self.change,
            "began": datetime.fromtimestamp(self.began, UTC).isoformat(),
            "seconds": {"value": self.seconds, "unit": "s", "origin": "measured"},
            "processor": {"value": self.processor_s, "unit": "s", "origin": "measured"},
            "job": self.job.to_dict(),
            "stand_in": self.stand_in.to_dict(),
            "emulated": self.emulated,
            "stages": [stage.to_dict() for stage in self.played],
            "predicted_beside_measured": [pair.to_dict() for pair in self.beside],
            "timeline": [moment.to_dict() for moment in self.moments],
            "folder": str(self.folder),
            "page": str(self.page),
            "versions": installed_versions("tpukit", "jax", "jaxlib", "libtpu"),
        }

    def __rich__(self) -> Renderable:
        from rich.console import Group
        from rich.text import Text

        verdict = (self.passed_words, "bold green") if self.is_good else self._failure()
        if self.is_good and self.change:
            verdict = (f"{self.passed_words}, with {self.change} in the job", "bold yellow")
        timing = (
            f"{seconds_text(self.seconds)} on the clock, {seconds_text(self.processor_s)} of "
            "processor time (measured)"
        )
        return Group(
            self._stages(),
            "",
            Text("predicted beside measured", style="bold"),
            self._pairs(),
            "",
            Text(verdict[0], style=verdict[1]) + Text(f"; {timing}", style="default"),
            Text(f"report: {self.page}"),
        )

    def _failure(self) -> tuple[str, str]:
        names = [stage.name for stage in self.played if stage.verdict == "failed"]
        return f"failed: {', '.join(names)}", "bold red"

    def _stages(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table("", "stage", "seconds", "what was found", box=None, pad_edge=False)
        table.columns[2].justify = "right"
        for stage in self.played:
            mark = Text(MARKS[stage.verdict], style=_STYLES[stage.verdict])
            table.add_row(mark, stage.name, f"{stage.seconds:.1f}", Text(stage.sentence))
        return table

    def _pairs(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table("what", "predicted", "of", "measured", "over predicted", box=None)
        table.pad_edge = False
        for pair in self.beside:
            predicted = f"{figure_text(pair.predicted)} ({pair.predicted.origin})"
            measured = figure_text(pair.measured)
            table.add_row(
                pair.what,
                predicted,
                Text(pair.predicted_of),
                measured if pair.measured.value is not None else f"– ({pair.measured.reason})",
                pair.ratio_text,
            )
        return table
