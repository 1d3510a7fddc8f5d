"""What changed between two reports, and nothing else."""

from dataclasses import dataclass, field
from typing import Any

from ...shown import Shown
from .changes import Change, compare_reports
from .schema import SCHEMA, Report, reads_report
from .side_by_side import SideBySide, rows_of, versions_text


@dataclass(frozen=True)
class ReportDiff(Shown):
    """Every difference between two reports, by section; parts of a sum, the largest first.

    Attributes:
        changes: What the second says otherwise than the first.
        made_with: The versions that the first and the second were made with.
    """

    changes: tuple[Change, ...] = field(default_factory=tuple[Change, ...])
    made_with: tuple[str, str] = ("", "")

    @property
    def side_by_side(self) -> SideBySide:
        """The changes in words."""
        names = ("before", "after")
        made_with = tuple(zip(names, self.made_with, strict=True))
        return SideBySide(made_with, (*names, "change"), rows_of(self.changes))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "schema": SCHEMA,
            "made_with": list(self.made_with),
            "changes": [change.to_dict() for change in self.changes],
        }

    def __rich__(self) -> Any:
        from rich.text import Text

        return self.side_by_side if self.changes else Text("nothing changed")


@reads_report
def diff_reports(a: Report, b: Report) -> ReportDiff:
    """Compare two reports: what `b` says otherwise than `a`."""
    found = tuple(change for change in compare_reports(a, b) if change.is_change)
    return ReportDiff(found, (versions_text(a), versions_text(b)))
