"""A check's report as one HTML page."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from ....compiler.timeline import TrackSpan
from ....hardware.figure import ORIGINS, bytes_text, count_text, flops_text, seconds_text
from ....pages.frame import Page, asset
from ....pages.markup import Child, Markup, join, tag
from ....pages.parts import (
    Column,
    Mood,
    PageSection,
    absent,
    badge,
    card,
    code,
    command,
    definitions,
    headline,
    section,
    table,
)
from ....plain_data import JsonMapping, JsonObject
from ....runtime.files import write_output
from ..schema import Report, as_report, reads_report, spans_of
from .memory import memory_section
from .time import BOUND_BY, communication_section, roofline_section, time_section
from .timeline import timeline_data, timeline_section

# Non-breaking spaces keep each on one line.
_COMPILED = {True: "✓\u00a0fits", False: "✗\u00a0too\u00a0large", None: "not\u00a0compiled"}


def write_html(
    report: JsonMapping, path: Path, *, spans: Sequence[TrackSpan] | None = None
) -> Path:
    """Write a report as one self-contained HTML file.

    Args:
        report: A report from `build_report` or `read_report`; see `schema.Report`.
        path: The file to write.
        spans: The spans of the predicted step; by default they are read from the report.

    Raises:
        TPUValidationError: It is not a report, or the path cannot be written.
    """
    write_output(path, render_html(report, spans))
    return path


@reads_report
def render_html(report: JsonMapping, spans: Sequence[TrackSpan] | None = None) -> str:
    """Return the page as text."""
    known = as_report(report)
    spans = spans_of(known) if spans is None else spans
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
    """Return everything below the verdict, in reading order."""
    advice = [next_section(report)] if report.get("fixes") or report.get("next") else []
    evidence = [memory_section(report), time_section(report)]
    if report.get("prediction"):
        evidence += [
            timeline_section(spans),
            roofline_section(report, spans),
            communication_section(report),
        ]
    # If it does not fit, the fixes come first; otherwise the evidence.
    refused = report.get("verdict") == "does not fit"
    ordered = [*advice, *evidence] if refused else [*evidence, *advice]
    capture = report.get("capture")
    program = [] if capture is None else [capture_section(capture)]
    return [*ordered, *program, about_section(report)]


def next_section(report: Report) -> PageSection:
    """Return the section with fixes and the command to run next."""
    fixes, run_next = report.get("fixes"), report.get("next")
    return section("Next", command(run_next) if run_next else "", _fixes(fixes) if fixes else "")


def about_section(report: Report) -> PageSection:
    """Return the section with job, options, versions and the meaning of badges."""
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


def _compile(compiled: JsonMapping) -> Child:
    took = (compiled.get("compile_s") or {}).get("value")
    if took is None:
        return ""
    earlier = " in an earlier run, kept on disk" if compiled.get("from_cache") else ""
    return tag("p", f"The compiler took {seconds_text(took)}{earlier}. ", badge("measured"))


def _list(title: str, values: JsonMapping) -> Markup:
    shown = definitions((key, code(_plain(value))) for key, value in values.items())
    return join(tag("h3", title), shown)


def _fixes(fixes: Sequence[JsonMapping]) -> Markup:
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
        inside = cast("JsonMapping", value)
        return "{" + ", ".join(f"{key}: {item}" for key, item in inside.items()) + "}"
    return str(value)


_NETWORKS = ("ici", "dcn")
_VERDICTS: dict[str, tuple[str, Mood]] = {
    "fits": ("FITS", "good"),
    "does not fit": ("DOES NOT FIT", "bad"),
}


def report_headline(report: Report) -> Markup:
    """Return the headline: verdict, program and slice, and four cards."""
    memory = report.get("memory")
    return headline(
        report.get("program") or "program",
        f"on {(report.get('slice') or {}).get('name') or 'an unnamed slice'}",
        verdict=_VERDICTS.get(report.get("verdict") or "", ("COULD NOT TELL", "unsure")),
        lead=_sentence(memory) if memory else "",
        cards=_cards(report),
    )


def binding_constraint(report: Report) -> tuple[str, str, str]:
    """Return the bottleneck, its share, and the origin of that figure."""
    memory, prediction = report.get("memory"), report.get("prediction")
    if report.get("verdict") == "does not fit" and memory:
        largest = max(memory["purposes"], key=lambda name: memory["purposes"][name], default="")
        amount = bytes_text(memory["purposes"].get(largest, 0))
        return "HBM capacity", f"most of it is {largest}: {amount}", "compiler"
    if not prediction:
        return "–", _why_no_step(report), ""
    seconds: dict[str, float] = prediction["seconds_by_cause"]
    cause = max(seconds, key=lambda name: seconds[name])
    share = f"{seconds[cause] / prediction['step_time_s']:.0%} of the step"
    waited = [row for row in report.get("collectives") or () if row["exposed_s"] > 0]
    if cause in _NETWORKS and waited:
        share += f", most in {waited[0]['kind']} over {waited[0]['group_size']} devices"
    return BOUND_BY.get(cause, cause), share, "model"


def _sentence(memory: JsonObject) -> Markup:
    need, have = memory["total_bytes"], memory.get("usable_bytes")
    words = f"{bytes_text(need)} of HBM per device"
    if have:
        left = bytes_text(abs(have - need))
        rest = f"{left} free" if memory["fits"] else f"{left} too much"
        words = (
            f"The compiler plans {bytes_text(need)} of {bytes_text(have)} HBM per device "
            f"({need / have:.1%}): {rest}."
        )
    return join(words, " ", badge(memory.get("origin", "compiler")))


def _cards(report: Report) -> list[Markup]:
    prediction = report.get("prediction")
    what, why, origin = binding_constraint(report)
    bound = card("Held back by", what, why, origin)
    if not prediction:
        return [card("Predicted step", "–", _why_no_step(report)), bound]
    low, high = seconds_text(prediction["low_s"]), seconds_text(prediction["high_s"])
    capture = report.get("capture") or {}
    if len(capture.get("programs") or ()) > 1 and capture["step_time_s"]["value"] is not None:
        return [*_cards_of_several(capture), bound]
    rate, mfu = prediction.get("tokens_per_s_per_chip"), prediction.get("mfu")
    examples = prediction.get("examples_per_s_per_chip")
    unit, rate = ("Tokens", rate) if examples is None else ("Examples", examples)
    not_tokens = "the program does not say how many tokens a step has"
    no_flops = (capture.get("mfu") or {}).get("reason") or (
        "the program does not say how many FLOPs its model has"
    )
    return [
        card(
            "Predicted step", seconds_text(prediction["step_time_s"]), f"{low} to {high}", "model"
        ),
        card("MFU", f"{mfu:.1%}", prediction["mfu_convention"], "model")
        if mfu is not None
        else card("MFU", "–", no_flops),
        card(f"{unit}/s/chip", f"{rate:,.0f}", _chips_words(report), "model")
        if rate is not None
        else card(f"{unit}/s/chip", "–", not_tokens),
        bound,
    ]


def _cards_of_several(capture: JsonObject) -> list[Markup]:
    """Return the cards of a captured step that consists of several programs."""
    mfu = capture["mfu"]
    runs = " + ".join(f"{one['calls']} × {one['name']}" for one in capture["programs"])
    return [
        card("Predicted step", seconds_text(capture["step_time_s"]["value"]), runs, "model"),
        card("MFU", "–", mfu["reason"])
        if mfu["value"] is None
        else card("MFU", f"{mfu['value']:.1%}", capture["mfu_counted"], mfu["origin"]),
    ]


def _why_no_step(report: Report) -> str:
    return report.get("no_prediction") or "the check stopped at the verdict on memory"


def _chips_words(report: Report) -> str:
    chips = (report.get("slice") or {}).get("chips")
    return f"{chips:,} chips" if chips else ""


def capture_section(capture: JsonMapping) -> PageSection:
    """Return the section with command, programs and findings of a captured program."""
    hosts = capture["processes"]
    peak = capture["peak_bytes"]["value"]
    how = (
        f"Run unmodified as process 0 of {hosts}, with jax {capture['versions']['jax']} on Python "
        f"{capture['versions']['python']}, in {seconds_text(capture['capture_s']['value'])}"
    )
    how += f" and {bytes_text(peak)} of host memory. " if peak else ". "
    notes = [f"Note: {note}" for note in capture["notes"]]
    if capture["written_count"]:
        notes.append(f"It opened {capture['written_count']} files for writing before its step.")
    if capture["refused"]:
        notes.append(f"It was kept from {', '.join(capture['refused'])}.")
    return section(
        "The program",
        command(shlex.join(capture["command"])),
        tag("p", how, "Nothing large was executed. ", badge("measured")),
        *(tag("p", note) for note in notes),
        _utilization(capture),
        _findings(capture["findings"]),
        _programs(capture["listed"], capture["programs"]),
    )


def _utilization(capture: JsonMapping) -> Child:
    """Return the share of peak that a step reaches, with and without recomputation."""
    rows: list[Sequence[Child]] = []
    counts = (
        ("MFU", "mfu", "model_flops", capture.get("mfu_counted", "").rstrip(",")),
        ("hardware utilization", "hardware_utilization", "hardware_flops", "recomputation counts"),
    )
    for name, share, flops, how in counts:
        reached, counted = capture.get(share), capture.get(flops) or {}
        if reached is None:  # a report of an earlier version
            continue
        if reached["value"] is None:
            rows.append((name, "–", "–", reached["reason"]))
            continue
        value = join(f"{reached['value']:.1%} ", badge(reached["origin"]))
        rows.append((name, value, flops_text(counted["value"]), how))
    columns = (Column("share of peak"), Column(""), Column("per step"), Column("counted"))
    return table(columns, rows, caption="How much of the peak it reaches") if rows else ""


def _findings(findings: Sequence[JsonMapping]) -> Child:
    if not findings:
        return absent("No Pallas kernel, no callback, no float32 matmul of weight was found.")
    rows: list[Sequence[Child]] = []
    for one in findings:
        cost, size = one["seconds"], one.get("size_bytes")
        took = join(seconds_text(cost["value"]), " ", badge("model")) if cost else ""
        held = join(" ", bytes_text(size["value"]), " of HBM ", badge("compiler")) if size else ""
        shown = join(took, held) if cost or size else "–"
        rows.append((one["kind"], one["evidence"], shown, one["advice"] or "–"))
    columns = (Column("finding"), Column("evidence"), Column("cost per step"), Column("way out"))
    return table(columns, rows, caption="What it really does")


def _programs(listed: Sequence[JsonMapping], step: Sequence[JsonMapping]) -> Child:
    calls = {one["name"]: one["calls"] for one in step}
    rows: list[Sequence[Child]] = []
    for one in sorted(listed, key=lambda row: -row["flops"]):
        rows.append(
            (
                code(one["name"]),
                one["kind"]
                + (f", {calls[one['name']]} × per step" if one["name"] in calls else ""),
                f"{one['flops']:.3g}",
                bytes_text(one["bytes_in"]),
                f"{one['donated']} of {one['arguments']}",
                code(one["line"]),
            )
        )
    columns = (
        *(Column("program"), Column("kind"), Column("FLOPs"), Column("arguments")),
        *(Column("donated"), Column("first called at")),
    )
    return table(columns, rows, caption="Its large programs, recorded instead of run")
