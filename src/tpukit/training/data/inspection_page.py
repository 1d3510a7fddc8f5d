"""An inspection as one HTML page that needs nothing else."""

from collections.abc import Sequence
from pathlib import Path

from ...checker.report.files import write_whole
from ...checker.report.html.markup import Html, coordinate, tag
from .inspection import Inspection, label

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
th { text-align: left; padding-right: 2rem; font-weight: 600; vertical-align: top; }
svg { width: 100%; height: auto; font-size: 13px; }
svg text { fill: currentColor; }
svg rect { fill: #4a7fd6; }
"""
_WIDTH, _ROW, _LEFT, _RIGHT = 800, 24, 200, 120


def write_inspection(inspection: Inspection, path: Path) -> Path:
    """Write the page.

    Raises:
        TPUValidationError: The place cannot be written.
    """
    write_whole(path, render_inspection(inspection).encode("utf-8", errors="replace"))
    return path


def render_inspection(inspection: Inspection) -> str:
    """The page as text."""
    rows = [
        tag("tr", tag("th", name, scope="row"), tag("td", value))
        for name, value in inspection.facts().items()
    ]
    body = [tag("h1", f"Data: {inspection.path}"), tag("table", rows)]
    if inspection.document_lengths:
        lengths = [
            (f"{entry.shortest:,}–{entry.longest:,}", entry.documents)
            for entry in inspection.document_lengths
        ]
        body += [tag("h2", "Documents by tokens"), _bars(lengths, "Documents by tokens")]
    frequent = [(label(entry), entry.count) for entry in inspection.most_frequent]
    body += [tag("h2", "Most frequent tokens"), _bars(frequent, "Most frequent tokens")]
    body.append(tag("p", "Every figure was counted from the data (measured)."))
    head = [
        Html('<meta charset="utf-8"/>'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"Data: {inspection.path}"),
        tag("style", Html(_STYLE)),
    ]
    page = tag("html", tag("head", head), tag("body", body), lang="en")
    return f"<!doctype html>\n{page}\n"


def _bars(rows: Sequence[tuple[str, int]], title: str) -> Html:
    most = max(count for _, count in rows)
    drawn: list[Html] = []
    for place, (name, count) in enumerate(rows):
        top = place * _ROW
        width = (_WIDTH - _LEFT - _RIGHT) * count / most
        middle = coordinate(top + _ROW * 0.7)
        drawn += [
            tag("text", name, x=_LEFT - 8, y=middle, text_anchor="end"),
            tag("rect", x=_LEFT, y=top + 3, width=coordinate(width), height=_ROW - 6),
            tag("text", f"{count:,}", x=coordinate(_LEFT + width + 6), y=middle),
        ]
    return tag(
        "svg",
        drawn,
        viewBox=f"0 0 {_WIDTH} {len(rows) * _ROW}",
        role="img",
        aria_label=title,
    )
