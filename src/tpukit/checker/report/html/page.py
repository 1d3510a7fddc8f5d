"""A report as one page: the verdict, then everything it stands on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....compiler.timeline import Span
from ....pages.frame import Page, asset
from ....pages.parts import Section
from ....runtime.files import write_output
from ..schema import Report, as_report, spans_of
from .about import about_section, next_section
from .headline import report_headline
from .memory import memory_section
from .roofline import roofline_section
from .time import communication_section, time_section
from .timeline import timeline_data, timeline_section


def write_html(report: Mapping[str, Any], path: Path) -> Path:
    """Write a report as one HTML file that needs nothing else.

    Args:
        report: What `build_report` gives or `read_report` reads; see `schema.Report`.
        path: Where to write.

    Raises:
        TPUValidationError: It is no report, or the place cannot be written.
    """
    write_output(path, render_html(report))
    return path


def render_html(report: Mapping[str, Any]) -> str:
    """The page as text."""
    known = as_report(report)
    spans = spans_of(known)
    target = (known.get("slice") or {}).get("name", "")
    return Page(
        title=f"{known.get('program', 'program')} on {target}: {known.get('verdict', 'unknown')}",
        headline=report_headline(known),
        sections=_sections(known, spans),
        footer="Made by tpukit check, without a TPU.",
        style=asset(__package__, "report.css"),
        script=asset(__package__, "report.js"),
        data={"timeline": timeline_data(spans, known.get("live_memory") or ()) if spans else None},
    ).render()


def _sections(report: Report, spans: Sequence[Span]) -> list[Section]:
    """Everything below the verdict, in reading order."""
    advice = [next_section(report)] if report.get("fixes") or report.get("next") else []
    evidence = [memory_section(report), time_section(report)]
    if report.get("prediction"):
        evidence += [
            timeline_section(spans),
            roofline_section(report, spans),
            communication_section(report),
        ]
    # Who is refused wants the way out first; who is not wants to see why.
    refused = report.get("verdict") == "does not fit"
    ordered = [*advice, *evidence] if refused else [*evidence, *advice]
    return [*ordered, about_section(report)]
