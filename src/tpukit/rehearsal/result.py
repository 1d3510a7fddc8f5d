"""`RehearsalResult`: what every stage found, predicted beside measured, as text, data and page."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from ..hardware.figure import seconds_text
from ..job.job import Job
from ..runtime.files import write_json, write_text
from ..runtime.versions import installed_versions
from ..shown import Shown
from .beside import Beside, figure_text
from .scene import Moment
from .stage import Played, StageResult
from .stages.check import Check
from .stand_in import StandIn

SCHEMA = "tpukit.rehearsal/1"
RESULT, PAGE = "rehearsal.json", "report.html"
GOOD, NOT_GOOD = 0, 1
MARKS = {"passed": "✓", "failed": "✗", "left out": "–"}
_STYLES = {"passed": "green", "failed": "red", "left out": "dim"}
Found = TypeVar("Found", bound=StageResult)


@dataclass(frozen=True, kw_only=True)
class RehearsalResult(Shown):
    """A rehearsal from its first stage to its last.

    Attributes:
        job: As it was given.
        stand_in: What was trained here.
        played: The stages.
        moments: What happened to the runs, in order.
        began: Unix seconds.
        seconds: On the clock, of all of it.
        emulated: Which cloud, in words.
        folder: Where everything is.
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
        return all(one.verdict != "failed" for one in self.played)

    @property
    def change(self) -> str:
        """What the job needs before it fits, as a line of YAML; "" where it fits as it is."""
        checked = self.find(Check)
        refused = None if checked is None else checked.refused
        if refused is None or refused.fix is None or refused.job != self.job:
            return ""
        return refused.fix.text

    @property
    def exit_code(self) -> int:
        """0, or 1 where a stage failed."""
        return GOOD if self.is_good else NOT_GOOD

    @property
    def passed_words(self) -> str:
        """How many stages passed, and whether any does not apply to the job."""
        left_out = sum(one.verdict == "left out" for one in self.played)
        if not left_out:
            return "all stages passed"
        return f"{len(self.played) - left_out} stages passed, {left_out} left out"

    @property
    def processor_s(self) -> float:
        """Processor time of all stages."""
        return sum(one.processor_s for one in self.played)

    @property
    def page(self) -> Path:
        """The report."""
        return self.folder / PAGE

    @property
    def beside(self) -> list[Beside]:
        """What was predicted beside what was measured, those that can be compared first."""
        found = [pair for one in self.played for pair in one.beside()]
        return sorted(found, key=lambda pair: not pair.is_comparable)

    def find(self, kind: type[Found]) -> Found | None:
        """Return what a stage found; None where it did not come to its end."""
        found = (one.finding for one in self.played)
        return next((one for one in found if isinstance(one, kind)), None)

    def write(self, folder: Path) -> None:
        """Write the page, and the same as data."""
        from .page import render_page

        write_text(folder / PAGE, render_page(self))
        write_json(folder / RESULT, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
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
            "stages": [one.to_dict() for one in self.played],
            "predicted_beside_measured": [pair.to_dict() for pair in self.beside],
            "timeline": [moment.to_dict() for moment in self.moments],
            "folder": str(self.folder),
            "page": str(self.page),
            "versions": installed_versions("tpukit", "jax", "jaxlib", "libtpu"),
        }

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        verdict = (self.passed_words, "bold green") if self.is_good else self._failure()
        if self.is_good and self.change:
            verdict = (f"{self.passed_words}, once the job says {self.change}", "bold yellow")
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
        names = [one.name for one in self.played if one.verdict == "failed"]
        return f"failed: {', '.join(names)}", "bold red"

    def _stages(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table("", "stage", "seconds", "what was found", box=None, pad_edge=False)
        table.columns[2].justify = "right"
        for one in self.played:
            mark = Text(MARKS[one.verdict], style=_STYLES[one.verdict])
            table.add_row(mark, one.name, f"{one.seconds:.1f}", Text(one.sentence))
        return table

    def _pairs(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table("what", "predicted", "of", "measured", "over predicted", box=None)
        table.pad_edge = False
        for pair in self.beside:
            said = f"{figure_text(pair.predicted)} ({pair.predicted.origin})"
            got = figure_text(pair.measured)
            table.add_row(
                pair.what,
                said,
                Text(pair.predicted_of),
                got if pair.measured.value is not None else f"– ({pair.measured.reason})",
                pair.ratio_text,
            )
        return table
