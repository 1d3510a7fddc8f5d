"""A report as one page: the verdict, then everything it stands on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ....compiler.timeline import TrackSpan
from ....hardware.figure import ORIGINS, bytes_text, count_text, seconds_text
from ....pages.frame import Page, asset
from ....pages.markup import Child, Markup, join, tag
from ....pages.parts import (
    Column,
    PageSection,
    absent,
    badge,
    code,
    command,
    definitions,
    section,
    table,
)
from ....runtime.files import write_output
from ..schema import Report, as_report, reads_report, spans_of
from .capture import capture_section
from .headline import report_headline
from .memory import memory_section
from .roofline import roofline_section
from .time import communication_section, time_section
from .timeline import timeline_data, timeline_section

# Kept on one line by spaces that do not break.
_COMPILED = {True: "✓\u00a0fits", False: "✗\u00a0too\u00a0large", None: "not\u00a0compiled"}


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


@reads_report
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


def _sections(report: Report, spans: Sequence[TrackSpan]) -> list[PageSection]:
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
    capture = report.get("capture")
    program = [] if capture is None else [capture_section(capture)]
    return [*ordered, *program, about_section(report)]


def next_section(report: Report) -> PageSection:
    """Fixes and the command to run next."""
    fixes, run_next = report.get("fixes"), report.get("next")
    return section("Next", command(run_next) if run_next else "", _fixes(fixes) if fixes else "")


def about_section(report: Report) -> PageSection:
    """Job, options, versions, and what the badges mean."""
    compiled = report.get("compile") or {}
    job = {
        key: value
        for key, value in (report.get("job") or {}).items()
        if value not in (None, {}, "") and key != "options"
    }
    options = report.get("options")
    made = dict(report.get("versions") or {})
    target = report.get("slice") or {}
    if target:
        shape = "x".join(str(size) for size in target["topology"])
        chips, hosts = count_text(target["chips"], "chip"), count_text(target["hosts"], "host")
        made[target["name"]] = f"{chips} ({shape}), {hosts}"
    return section(
        "About",
        _list("The job", job) if job else absent("No job: a function or a program of its own."),
        _list("Compiler options", options) if options else absent("No compiler options were set."),
        _list("Versions and slice", made) if made else absent("No versions were recorded."),
        _compile(compiled),
        tag("h3", "Where numbers come from"),
        definitions((badge(origin), words) for origin, words in ORIGINS.items()),
    )


def _compile(compiled: Mapping[str, Any]) -> Child:
    took = (compiled.get("compile_s") or {}).get("value")
    if took is None:
        return ""
    earlier = " in an earlier run, kept on disk" if compiled.get("from_cache") else ""
    return tag("p", f"The compiler took {seconds_text(took)}{earlier}. ", badge("measured"))


def _list(title: str, values: Mapping[str, Any]) -> Markup:
    shown = definitions((key, code(_plain(value))) for key, value in values.items())
    return join(tag("h3", title), shown)


def _fixes(fixes: Sequence[Mapping[str, Any]]) -> Markup:
    rows: list[Sequence[Child]] = []
    for fix in fixes:
        verified, estimate = fix["verified"]["value"], fix["estimate"]["value"]
        amount = verified if verified is not None else estimate
        reason = fix.get("failure") or fix["estimate"].get("reason") or ""
        origin = "compiler" if verified is not None else "model"
        size = (
            join(bytes_text(amount), " ", badge(origin))
            if amount is not None
            else tag("div", reason, class_="reason")
        )
        fits = "advice" if fix.get("advice") else _COMPILED[fix["fits"]]
        changes = ", ".join(f"{key}: {_plain(value)}" for key, value in fix["changes"].items())
        rows.append((code(changes), size, fits, fix["cost"]))
    columns = (
        Column("change"),
        Column("HBM per device"),
        Column("compiled"),
        Column("what it costs"),
    )
    return table(columns, rows, caption="Changes that take less memory, the best first")


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        inside = cast("Mapping[str, Any]", value)
        return "{" + ", ".join(f"{key}: {item}" for key, item in inside.items()) + "}"
    return str(value)
