"""One self-contained page: no request leaves it, and only its own script may run."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ....compiler.timeline import Span
from ..files import write_whole
from ..loading import as_report, spans_of
from ..schema import Report
from .about import about_section, next_section
from .headline import headline
from .markup import Html, slug, tag
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
    write_whole(path, render_html(report).encode("utf-8", errors="replace"))
    return path


def render_html(report: Mapping[str, Any]) -> str:
    """The page as text."""
    known = as_report(report)
    spans = spans_of(known)
    style, script = _asset("report.css"), _asset("report.js")
    sections = _sections(known, spans)
    data = {"timeline": timeline_data(spans, known.get("live_memory") or ()) if spans else None}
    target = (known.get("slice") or {}).get("name", "")
    title = f"{known.get('program', 'program')} on {target}: {known.get('verdict', 'unknown')}"
    head = [
        Html('<meta charset="utf-8"/>'),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Html(style)),
    ]
    menu = tag(
        "nav",
        tag("a", "Skip to content", href="#content", class_="skip"),
        [tag("a", name, href=f"#{slug(name)}") for name in sections],
        tag("button", "Theme: auto", type="button", id="theme", class_="script-only"),
        aria_label="Sections",
    )
    page = tag(
        "html",
        tag("head", head),
        tag(
            "body",
            menu,
            tag("main", headline(known), sections.values(), id="content"),
            tag("footer", "Made by tpukit check, without a TPU."),
            tag("script", Html(_inert_json(data)), type="application/json", id="report-data"),
            tag("script", Html(script)),
        ),
        lang="en",
    )
    return f"<!doctype html>\n{page}\n"


def _sections(report: Report, spans: Sequence[Span]) -> dict[str, Html]:
    """Everything below the verdict by title, in reading order."""
    advice = {"Next": next_section(report)} if report.get("fixes") or report.get("next") else {}
    # Who is refused wants the way out first; who is not wants to see why.
    refused = report.get("verdict") == "does not fit"
    shown = {**(advice if refused else {}), "Memory": memory_section(report)}
    shown["Time"] = time_section(report)
    if report.get("prediction"):
        shown["Timeline"] = timeline_section(spans)
        shown["Roofline"] = roofline_section(report, spans)
        shown["Communication"] = communication_section(report)
    return {**shown, **advice, "About": about_section(report)}


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _inert_json(data: Mapping[str, Any]) -> str:
    """JSON in which no text can end the element it stands in."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    return (files("tpukit.checker.report.html") / "assets" / name).read_text(encoding="utf-8")
