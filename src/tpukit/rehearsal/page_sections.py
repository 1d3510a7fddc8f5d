"""Sections of a rehearsal's page on single stages: memory, where the time went, what was said."""

from collections.abc import Sequence

from ..compiler.memory import MemoryReport
from ..hardware.figure import bytes_text
from ..observe.runs.goodput import label_of
from ..pages.charts import BarMark, BarPiece, stacked_bar
from ..pages.markup import Child, join, slug, tag
from ..pages.parts import Column, PageSection, absent, legend, section, table
from .stages.check import Check, RefusedJob
from .stages.generate import Generate
from .stages.monitor import Monitor

_LOST_KINDS = {
    "compile": "c-kernel",
    "initialise": "c-host",
    "restart": "c-ici",
    "restore": "c-vector",
    "checkpoint": "c-hbm",
    "lost": "c-dcn",
}
_USEFUL = "c-matrix"


def memory_section(checked: Check, refused: RefusedJob) -> PageSection:
    """The job that does not fit above those that do, all on one scale against the same limit."""
    rows: dict[str, MemoryReport | None] = {refused.words: refused.memory}
    if refused.fix is not None and refused.fixed is not None:
        rows[f"with {refused.fix.text}"] = refused.fixed.memory
    if checked.whole is not None and checked.whole is not refused.fixed:
        rows["as it was given"] = checked.whole.memory
    reports = {words: report for words, report in rows.items() if report is not None}
    if not reports:
        return section("Memory", absent(refused.sentence))
    whole = max(max(one.total_bytes, one.usable_bytes or 0) for one in reports.values())
    columns = (
        Column("job"),
        Column("HBM of one device", is_bar=True),
        Column("used", is_number=True, origin="compiler"),
    )
    used = {
        kind
        for report in reports.values()
        for kind, amount in report.purposes.items()
        if amount > 0.005 * whole
    }
    return section(
        "Memory",
        table(
            columns,
            [_memory_row(words, report, whole) for words, report in reports.items()],
            caption="One that does not fit, and the fix that makes it",
        ),
        legend(
            {_color(kind): kind for kind in reports[next(iter(reports))].purposes if kind in used}
        ),
        intro=refused.sentence,
    )


def _memory_row(words: str, report: MemoryReport, whole: float) -> Sequence[Child]:
    usable = report.usable_bytes or report.total_bytes
    pieces = [
        BarPiece(_color(kind), amount, f"{kind}: {bytes_text(amount)}")
        for kind, amount in report.purposes.items()
        if amount
    ]
    limit = BarMark(usable, is_limit=True)
    bar = stacked_bar(pieces, whole=whole, label=f"HBM: {words}", marks=[limit])
    return words, bar, f"{bytes_text(report.total_bytes)} of {bytes_text(usable)}"


def _color(purpose: str) -> str:
    return f"p-{slug(purpose)}"


def goodput_section(watched: Monitor) -> PageSection:
    """Where the time of the preempted run went, as one bar and by cause."""
    goodput = watched.goodput
    parts = {"steps that count": (_USEFUL, goodput.total.productive_s)}
    for cause, seconds in goodput.badput_s.items():
        parts[label_of(cause)] = (_LOST_KINDS.get(cause, "c-overhead"), seconds)
    pieces = [BarPiece(kind, seconds, f"{label}: {seconds:.2f} s")
              for label, (kind, seconds) in parts.items()]  # fmt: skip
    whole = sum(seconds for _, seconds in parts.values())
    rows: list[Sequence[Child]] = [
        (label, f"{seconds:.2f} s", f"{seconds / whole:.1%}")
        for label, (_, seconds) in parts.items()
    ]
    columns = (Column("where the time went"), Column("seconds", is_number=True, origin="measured"),
               Column("share", is_number=True))  # fmt: skip
    return section(
        "Watched",
        stacked_bar(pieces, whole=whole, label="Where the time of the preempted run went"),
        legend({kind: label for label, (kind, seconds) in parts.items() if seconds}),
        table(columns, rows, caption="Across all attempts"),
        tag("p", watched.stragglers) if watched.hosts > 1 else "",
        intro=watched.sentence,
    )


def text_section(spoken: Generate) -> PageSection:
    """What the model says, as it was trained and quantized."""
    texts = (("as trained", spoken.trained), ("quantized", spoken.quantized))
    shown = [
        join(tag("h3", title), tag("div", spoken.prompt, tag("span", part.text), class_="told"))
        for title, part in texts
    ]
    words = "Greedy, from the same prompt. A model that was trained for seconds says little."
    return section("Generated", shown, intro=words)
