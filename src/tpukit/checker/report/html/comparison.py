"""Reports side by side as one HTML page."""

from pathlib import Path

from ....hardware.figure import ORIGINS
from ....pages.frame import Page
from ....pages.markup import Child, tag
from ....pages.parts import (
    Column,
    PageSection,
    absent,
    badge,
    definitions,
    headline,
    section,
    table,
)
from ....runtime.files import write_output
from ..comparison import Comparison, ReportDiff, Row, SideBySide

# Caption of each section's table.
_OF = {
    "verdict": "Whether it fits",
    "program": "What is compiled",
    "memory": "HBM of one device",
    "time": "One step",
    "operations": "In the compiled program",
    "communication": "Collectives of one step",
    "options": "Of the compiler",
}


def write_comparison(found: Comparison | ReportDiff, path: Path) -> Path:
    """Write a comparison as one self-contained HTML file.

    Raises:
        TPUValidationError: The path cannot be written.
    """
    write_output(path, render_comparison(found))
    return path


def render_comparison(found: Comparison | ReportDiff) -> str:
    """Return the page as text."""
    if isinstance(found, Comparison):
        subject, rest = found.program, "with " + " and ".join(one.toolchain for one in found.checks)
    else:
        subject, rest = "What changed", "from one check to another"
    columns = found.side_by_side
    return Page(
        title=f"{subject} {rest}",
        headline=headline(subject, rest),
        sections=[
            section("Made with", definitions(columns.made_with)),
            *_sections(columns),
            _about(),
        ],
        footer="Made by tpukit, without a TPU.",
    ).render()


def _sections(columns: SideBySide) -> list[PageSection]:
    heads = [Column(""), *(Column(one, is_number=True) for one in columns.headings), Column("")]
    found = [
        section(title.capitalize(), table(heads, map(_cells, rows), caption=_OF[title]))
        for title, rows in columns.sections.items()
    ]
    return found or [section("Nothing changed", absent("Every figure of the two is the same."))]


def _cells(row: Row) -> list[Child]:
    name = tag("span", "· ", row.name) if row.is_part else row.name
    return [name, *row.cells, badge(row.origin) if row.origin else ""]


def _about() -> PageSection:
    meanings = ((badge(origin), words) for origin, words in ORIGINS.items())
    return section("Where numbers come from", definitions(meanings))
