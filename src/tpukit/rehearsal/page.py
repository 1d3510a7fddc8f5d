"""A rehearsal as one page: verdict, story by stage, predicted beside measured, timeline."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ..hardware.figure import Figure, bytes_text, seconds_text
from ..pages.frame import Page, asset
from ..pages.markup import Child, Markup, join, tag
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
from .beside import Beside, figure_text
from .drawings import Axis, losses, timeline
from .page_sections import goodput_section, memory_section, text_section
from .stages.check import Check
from .stages.generate import Generate
from .stages.launch import CalmRun
from .stages.monitor import Monitor
from .stages.preempt import Preempt
from .stages.profile import ProfileResult
from .stages.resume import Resume

if TYPE_CHECKING:
    from .result import RehearsalResult

_MARKS = {"passed": ("✓", "good"), "failed": ("✗", "bad"), "left out": ("–", "unsure")}
_TWO_MACHINES = (
    "Predictions of steps and memory are for TPUs, by their compiler; what ran here ran on this "
    "machine's CPU, as virtual devices. Where the two machines differ, the figures stand beside "
    "each other and are not compared."
)


def render_page(result: "RehearsalResult") -> str:
    """The page as text."""
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
    failed = [one for one in result.played if one.verdict == "failed"]
    if failed:
        return f"{failed[0].name}: {failed[0].sentence}"
    change = f"It does not fit as it is; with {result.change} it does. " if result.change else ""
    return change + (
        "Planned, checked, launched on an emulated cloud, preempted twice, resumed, watched, "
        f"profiled, quantized and asked to speak, in {seconds_text(result.seconds)}."
    )


def _cards(result: "RehearsalResult") -> list[Markup]:
    """The figures asked for first."""
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
                "preempted twice, beside a run nobody disturbed",
                "measured",
            )
        )
    if taken is not None:
        down = [loss.downtime_s or 0.0 for loss in taken.run.outcome.losses]
        again = sum(loss.lost_steps for loss in taken.run.outcome.losses)
        longest = seconds_text(max(down, default=0.0))
        cards.append(card("Back after", longest, f"{again} steps done again", "measured"))
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
    for one in result.played:
        mark, mood = _MARKS[one.verdict]
        word = tag("span", mark, class_=mood, title=one.verdict)
        what = join(tag("div", one.question, class_="card-below"), one.sentence)
        rows.append((word, tag("span", one.name, class_="said"), f"{one.seconds:.1f} s", what))
    return section("Story", table(columns, rows, caption="Stage by stage"))


def _beside(pairs: Sequence[Beside]) -> PageSection:
    if not pairs:
        return section("Predicted and measured", absent("No stage came so far."))
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
        rows = [_pair(one) for one in pairs if one.is_comparable is comparable]
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
    runs = [one.run for one in (result.find(CalmRun), result.find(Preempt)) if one is not None]
    axis = Axis(result.began, result.seconds)
    kinds = {
        "starting": "processes start",
        "stepping": "steps",
        "save": "a checkpoint is saved",
        "taken-away": "the pod is taken away",
    }
    shown = [one for one in result.moments if one.kind != "saved"]
    rows: list[Sequence[Child]] = [
        (f"{one.at - result.began:.2f} s", one.of, one.text) for one in shown
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
    after = [] if taken is None else [one.last_step or 0 for one in taken.run.outcome.attempts[:-1]]
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
