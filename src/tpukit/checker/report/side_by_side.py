"""Reports in columns, as text: what a terminal and a page show of a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...shown import Shown
from .changes import Change
from .schema import Report


@dataclass(frozen=True)
class Row:
    """One figure in words.

    Attributes:
        section: One of `changes.SECTIONS`.
        cells: As many as there are headings.
        is_part: Whether it is part of a sum in the same section.
    """

    section: str
    name: str
    cells: tuple[str, ...]
    origin: str
    is_part: bool = False


@dataclass(frozen=True)
class SideBySide(Shown):
    """Columns of figures, by section.

    Attributes:
        made_with: What each report is called, and the versions it was made with.
        headings: Of the columns between a figure's name and its origin.
    """

    made_with: tuple[tuple[str, str], ...]
    headings: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def sections(self) -> dict[str, list[Row]]:
        """The rows by section, in order."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.section, []).append(row)
        return found

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        header = Table(box=None, show_header=False, pad_edge=False)
        for name, versions in self.made_with:
            header.add_row(Text(name, style="bold"), Text(versions))
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for heading in self.headings:
            table.add_column(heading, justify="right", no_wrap=heading == "change")
        table.add_column("origin")
        for section, rows in self.sections.items():
            table.add_row(Text(section, style="bold"))
            for row in rows:
                indent = "    " if row.is_part else "  "
                table.add_row(Text(indent + row.name), *map(Text, row.cells), Text(row.origin))
        return Group(header, table)


def rows_of(changes: Sequence[Change]) -> tuple[Row, ...]:
    """Put changes between two reports into words; versions stand above the columns."""
    return tuple(
        Row(one.section, one.name, one.words, one.origin, one.is_part)
        for one in changes
        if one.section != "versions"
    )


def versions_text(report: Report) -> str:
    """What a report was made with, in a line."""
    found = report.get("versions") or {}
    return ", ".join(f"{name} {number}" for name, number in found.items()) or "unknown versions"
