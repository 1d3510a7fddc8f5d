"""The rehearsal as one page: verdict, stages, timeline, predicted beside measured, and details."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ..compiler.memory import MemoryReport
from ..hardware.figure import Figure, bytes_text, seconds_text
from ..observe.runs.goodput import label_of
from ..pages.charts import BarMark, BarPiece, stacked_bar
from ..pages.frame import Page, asset
from ..pages.markup import Child, Markup, join, slug, tag
from ..pages.parts import (
    Column,
    Mood,
    PageSection,
    absent,
    badge,
    bullets,
    card,
    code,
    command,
    headline,
    legend,
    long_table,
    section,
    table,
    warning,
)
from .drawings import Axis, losses, timeline
from .stage import Beside, figure_text
from .stages.check import Check, RefusedJob
from .stages.launch import CalmRun
from .stages.monitor import Monitor, ProfileResult
from .stages.preempt import Preempt, Resume
from .stages.quantize import Generate

if TYPE_CHECKING:
    from .result import RehearsalResult

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
    """Return the section with the memory of the job that does not fit and of those that do."""
    rows: dict[str, MemoryReport | None] = {refused.words: refused.memory}
    if refused.fix is not None and refused.fixed is not None:
        rows[f"with {refused.fix.text}"] = refused.fixed.memory
    if checked.whole is not None and checked.whole is not refused.fixed:
        rows["as it was given"] = checked.whole.memory
    reports = {words: report for words, report in rows.items() if report is not None}
    if not reports:
        return section("Memory", absent(refused.sentence))
    whole = max(max(report.total_bytes, report.usable_bytes or 0) for report in reports.values())
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
    """Return the section with the preempted run's time by cause."""
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
    """Return the section with the texts of the trained and the quantized model."""
    texts = (("as trained", spoken.trained), ("quantized", spoken.quantized))
    shown = [
        join(tag("h3", title), tag("div", spoken.prompt, tag("span", part.text), class_="told"))
        for title, part in texts
    ]
    words = "Greedy, from the same prompt. A model that was trained for seconds has learnt little."
    return section("Generated", shown, intro=words)


_MARKS = {"passed": ("✓", "good"), "failed": ("✗", "bad"), "left out": ("–", "unsure")}
_TWO_MACHINES = (
    "Predictions of steps and memory are for TPUs, by their compiler; what ran here ran on this "
    "machine's CPU, as virtual devices. Where the two machines differ, the figures stand beside "
    "each other and are not compared."
)


def render_page(result: "RehearsalResult") -> str:
    """Return the page as HTML."""
    at = datetime.fromtimestamp(result.began, UTC)
    return Page(
        title=f"Rehearsal of {result.job.model}",
        headline=headline(
            str(result.job.model),
            f"on {result.job.slice}, {at:%Y-%m-%d %H:%M} UTC",
            verdict=_verdict(result),
            lead=_lead(result),
            cards=_cards(result),
        ),
        sections=_sections(result),
        footer="Made by tpukit rehearse, without a TPU and without a cloud.",
        style=asset("tpukit.rehearsal", "rehearsal.css"),
    ).render()


def _verdict(result: "RehearsalResult") -> tuple[str, Mood]:
    if not result.is_good:
        return "NOT READY", "bad"
    return ("READY WITH A CHANGE", "unsure") if result.change else ("READY", "good")


def _lead(result: "RehearsalResult") -> str:
    failed = [stage for stage in result.played if stage.verdict == "failed"]
    if failed:
        return f"{failed[0].name}: {failed[0].sentence}"
    change = f"It does not fit unchanged; with {result.change} it does. " if result.change else ""
    return change + (
        "Planned, checked, launched on an emulated cloud, preempted twice, resumed, watched, "
        f"profiled, quantized and used to generate text, in {seconds_text(result.seconds)}."
    )


def _cards(result: "RehearsalResult") -> list[Markup]:
    """Return the main figures."""
    cards: list[Markup] = []
    checked, resumed = result.find(Check), result.find(Resume)
    taken, watched = result.find(Preempt), result.find(Monitor)
    if checked is not None and checked.whole is not None:
        memory = checked.whole.memory
        below = f"of {bytes_text(memory.usable_bytes or 0)} usable, one device of {memory.slice}"
        below += f", with {result.change}" if result.change else ""
        cards.append(card("HBM", bytes_text(memory.total_bytes), below, "compiler"))
    if resumed is not None:
        equal = len(resumed.undisturbed) - len(resumed.different)
        cards.append(
            card(
                "Losses equal to the bit",
                f"{equal} of {len(resumed.undisturbed)}",
                "preempted twice, beside an uninterrupted run",
                "measured",
            )
        )
    if taken is not None:
        down = [loss.downtime_s or 0.0 for loss in taken.run.outcome.losses]
        again = sum(loss.lost_steps for loss in taken.run.outcome.losses)
        longest = seconds_text(max(down, default=0.0))
        cards.append(card("Back after", longest, f"{again} steps repeated", "measured"))
    if watched is not None and watched.goodput.share is not None:
        below = f"over {watched.goodput.attempts} attempts of a run of seconds"
        cards.append(card("Goodput", f"{watched.goodput.share:.1%}", below, "measured"))
    return cards


def _sections(result: "RehearsalResult") -> list[PageSection]:
    found = [_story(result), _beside(result.beside), _happened(result)]
    if (resumed := result.find(Resume)) is not None:
        found.append(_losses(resumed, result.find(Preempt)))
    if (checked := result.find(Check)) is not None and checked.refused is not None:
        found.append(memory_section(checked, checked.refused))
    if (watched := result.find(Monitor)) is not None:
        found.append(goodput_section(watched))
    if (spoken := result.find(Generate)) is not None:
        found.append(text_section(spoken))
    found.append(_about(result))
    return found


def _story(result: "RehearsalResult") -> PageSection:
    columns = (Column(""), Column("stage"), Column("took", is_number=True, origin="measured"),
               Column("what was found"))  # fmt: skip
    rows: list[Sequence[Child]] = []
    for stage in result.played:
        mark, mood = _MARKS[stage.verdict]
        word = tag("span", mark, class_=mood, title=stage.verdict)
        what = join(tag("div", stage.question, class_="card-below"), stage.sentence)
        rows.append((word, tag("span", stage.name, class_="said"), f"{stage.seconds:.1f} s", what))
    return section("Story", table(columns, rows, caption="Stage by stage"))


def _beside(pairs: Sequence[Beside]) -> PageSection:
    if not pairs:
        return section("Predicted and measured", absent("No stage got this far."))
    columns = (
        Column("what"),
        Column("predicted", is_number=True),
        Column("for"),
        Column("measured", is_number=True),
        Column("on"),
        Column("measured / predicted", is_number=True),
    )
    parts: list[Child] = []
    for title, comparable in (
        ("What can be compared", True),
        ("Of two different machines: side by side, not compared", False),
    ):
        rows = [_pair(pair) for pair in pairs if pair.is_comparable is comparable]
        if rows:
            kept = columns if comparable else columns[:-1]
            parts.append(table(kept, [row[: len(kept)] for row in rows], caption=title))
    return section("Predicted and measured", parts, intro=_TWO_MACHINES)


def _pair(pair: Beside) -> Sequence[Child]:
    remark = tag("div", pair.remark, class_="card-below") if pair.remark else ""
    return (
        join(pair.what, remark),
        _figure(pair.predicted),
        pair.predicted_of,
        _figure(pair.measured),
        pair.measured_on,
        pair.ratio_text,
    )


def _figure(figure: Figure) -> Child:
    if figure.value is None:
        return tag("span", "–", title=figure.reason)
    title = "; ".join(filter(None, (figure.source, figure.note)))
    return join(tag("span", figure_text(figure), title=title), " ", badge(figure.origin or ""))


def _happened(result: "RehearsalResult") -> PageSection:
    stages = (result.find(CalmRun), result.find(Preempt))
    runs = [stage.run for stage in stages if stage is not None]
    axis = Axis(result.began, result.seconds)
    kinds = {
        "starting": "processes start",
        "stepping": "steps",
        "save": "a checkpoint is saved",
        "preempted": "the pod is preempted",
    }
    shown = [moment for moment in result.moments if moment.kind != "saved"]
    rows: list[Sequence[Child]] = [
        (f"{moment.at - result.began:.2f} s", moment.of, moment.text) for moment in shown
    ]
    columns = (Column("at", is_number=True, origin="measured"), Column("run"), Column("what"))
    events = long_table(columns, rows, caption="Events", rest="more events")
    return section(
        "Timeline",
        timeline(result.played, runs, result.moments, axis),
        legend(kinds),
        events if rows else absent("Nothing was launched."),
    )


def _losses(resumed: Resume, taken: Preempt | None) -> PageSection:
    if not resumed.undisturbed:
        return section("Losses", absent(resumed.sentence))
    after = (
        []
        if taken is None
        else [attempt.last_step or 0 for attempt in taken.run.outcome.attempts[:-1]]
    )
    kinds = {"undisturbed": "undisturbed", "resumed": "preempted twice, on the same line"}
    verdict = tag("p", resumed.sentence)
    drawn = losses(resumed.undisturbed, resumed.preempted, after)
    return section("Losses", drawn, legend(kinds), verdict if resumed.is_good else
                   warning(resumed.sentence))  # fmt: skip


def _about(result: "RehearsalResult") -> PageSection:
    same = result.stand_in.is_same_model
    intro = (
        "The model that was checked is the one that was trained here."
        if same
        else "The job was planned and checked as it is. What was trained here stands in for it:"
    )
    again = command(f"tpukit dashboard {result.folder}")
    spent = (
        f"{seconds_text(result.seconds)} on the clock, {seconds_text(result.processor_s)} of "
        "processor time"
    )
    launched = result.find(Preempt)
    cost = [] if launched is None else [f"its pods, by the catalogue: {launched.run.cost.summary}"]
    profile = result.find(ProfileResult)
    bound = [] if profile is None else profile.analysis.recommendations[:2]
    return section(
        "About",
        bullets(result.stand_in.differences),
        tag("h3", "What it took"),
        bullets([join(spent, " ", badge("measured")), *cost, *bound]),
        tag("h3", "Look further"),
        tag("p", "Runs, the small model and this result as data are in ", code(str(result.folder)),
            "."),
        again,
        intro=intro,
    )  # fmt: skip
