"""A plan as one HTML page: choices, time, memory, rejected slices and assumptions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...hardware.figure import bytes_text, seconds_text
from ...hardware.mesh_sizes import write_mesh
from ...pages.charts import BarMark, BarPiece, stacked_bar
from ...pages.frame import Page
from ...pages.markup import Child, Markup, join, tag
from ...pages.parts import (
    Column,
    Mood,
    PageSection,
    absent,
    badge,
    bullets,
    card,
    command,
    headline,
    legend,
    section,
    table,
)
from ..amounts import count_text, days_text
from ..cost.step_variant import CAUSES
from ..search.choice import Choice
from .report import (
    batch_text,
    chips_text,
    front_words,
    mfu_text,
    money_text,
    price_text,
    remat_text,
    verdict_words,
)

if TYPE_CHECKING:
    from .report import AnyPlan

# Colors of causes and purposes, as named in the style sheet.
_CAUSE_KINDS = {
    cause: {"attention": "c-kernel", "bubble": "c-overhead"}.get(cause, f"c-{cause}")
    for cause in CAUSES
}
_PURPOSE_KINDS = {
    "weights": "p-parameters",
    "gradients": "p-gradients",
    "optimizer": "p-optimizer-state",
    "activations": "p-activations",
    "temporaries": "p-temporaries",
}


def render_page(result: "AnyPlan") -> str:
    """Return the page as text, for a new plan or a recorded one."""
    word, words = verdict_words(result)
    mood: Mood = "good" if result.feasible else "unsure" if result.best else "bad"
    return Page(
        title=f"Plan for {result.model}",
        headline=headline(
            result.model,
            f"on {count_text(result.tokens)} tokens",
            verdict=(word, mood),
            lead=words,
            cards=_cards(result.best) if result.best else (),
        ),
        sections=_sections(result),
        footer="Made by tpukit plan, without a TPU.",
    ).render()


def _cards(best: Choice) -> list[Markup]:
    used = f"of {bytes_text(best.usable_bytes)} usable on a device"
    timed = best.run_time.origin or ""
    paid = best.usd.origin or best.chip_time.origin or ""
    return [
        card("Cost", money_text(best), f"{chips_text(best)}, {price_text(best)}", paid),
        card("Time", days_text(best.days), f"steps of {seconds_text(best.step_time_s)}", timed),
        card(
            "Tokens/s/chip",
            f"{best.tokens_per_s_per_chip:,.0f}",
            mfu_text(best).removeprefix(", "),
            timed,
        ),
        card("HBM", bytes_text(best.memory_bytes), used, best.hbm.origin or ""),
    ]


def _sections(result: "AnyPlan") -> list[PageSection]:
    shown = [_choices("Choices", result.choices, result)]
    if result.unpriced:
        shown.append(_choices("Without a price", result.unpriced, result))
    if len(result.front) > 1:
        shown.append(_front(result))
    if result.rejected:
        rows = [(one.what, one.reason) for one in result.rejected]
        columns = (Column("slices"), Column("why", origin="model"))
        shown.append(section("Left out", table(columns, rows, caption="Slices left out")))
    if result.extrapolations:
        shown.append(section("Faster than anyone has published", bullets(result.extrapolations)))
    if result.disagreements:
        shown.append(section("What the compiler says otherwise", bullets(result.disagreements)))
    shown.append(section("Assumed", bullets(result.assumptions)))
    if result.next_command:
        shown.append(section("Next", command(result.next_command)))
    return shown


def _choices(title: str, choices: Sequence[Choice], result: "AnyPlan") -> PageSection:
    if not choices:
        return section(title, absent(result.shortfall))
    columns = (
        Column("slice"),
        Column("cost", is_number=True, origin="model"),
        Column("time", is_number=True, origin="model"),
        Column("step", is_number=True, origin="model"),
        Column("tokens/s/chip", is_number=True, origin="model"),
        Column("HBM a device", is_number=True),
        Column("how"),
    )
    rows: list[Sequence[Child]] = [
        (
            _slice(choice),
            money_text(choice),
            days_text(choice.days),
            seconds_text(choice.step_time_s),
            f"{choice.tokens_per_s_per_chip:,.0f}",
            join(bytes_text(choice.memory_bytes), " ", badge(choice.hbm.origin or "")),
            f"{write_mesh(choice.mesh)}, batch {batch_text(choice)}, {remat_text(choice)}",
        )
        for choice in choices
    ]
    return section(
        title, table(columns, rows, caption="Best first"), _times(choices), _memories(choices)
    )


def _times(choices: Sequence[Choice]) -> Markup:
    """Draw one bar per choice with the causes of its step time."""
    rows: list[Sequence[Child]] = []
    for choice in choices:
        pieces = [
            BarPiece(kind, choice.seconds_by_cause[cause], f"{cause}: {_share(choice, cause)}")
            for cause, kind in _CAUSE_KINDS.items()
            if choice.seconds_by_cause[cause]
        ]
        whole = sum(choice.seconds_by_cause.values())
        label = f"Where the step goes on {choice.slice}"
        rows.append(
            (_slice(choice), stacked_bar(pieces, whole=whole, label=label),
             seconds_text(whole))
        )  # fmt: skip
    spent = {cause for choice in choices for cause in CAUSES if choice.seconds_by_cause[cause]}
    return join(
        _bars("share of the step", "step", rows, caption="Where a step's time goes"),
        legend({kind: cause for cause, kind in _CAUSE_KINDS.items() if cause in spent}),
    )


def _slice(choice: Choice) -> Markup:
    return tag("code", str(choice.slice), class_="nowrap")


def _share(choice: Choice, cause: str) -> str:
    seconds = choice.seconds_by_cause[cause]
    return f"{seconds_text(seconds)}, {seconds / sum(choice.seconds_by_cause.values()):.0%}"


def _memories(choices: Sequence[Choice]) -> Markup:
    """Draw one bar per choice with the purposes of its HBM, up to the device's capacity."""
    rows: list[Sequence[Child]] = []
    for choice in choices:
        pieces = [
            BarPiece(
                kind, choice.memory[purpose], f"{purpose}: {bytes_text(choice.memory[purpose])}"
            )
            for purpose, kind in _PURPOSE_KINDS.items()
        ]
        whole = max(choice.usable_bytes, choice.memory["total"])
        limit = BarMark(choice.usable_bytes, is_limit=True)
        label = f"HBM of one device of {choice.slice}"
        total = f"{bytes_text(choice.memory['total'])} of {bytes_text(choice.usable_bytes)}"
        rows.append(
            (_slice(choice), stacked_bar(pieces, whole=whole, label=label, marks=[limit]),
             total)
        )  # fmt: skip
    return join(
        _bars("HBM", "used", rows, caption="What is in the memory of one device"),
        legend({kind: purpose for purpose, kind in _PURPOSE_KINDS.items()}),
    )


def _bars(bar: str, amount: str, rows: Sequence[Sequence[Child]], *, caption: str) -> Markup:
    columns = (
        Column("slice"),
        Column(bar, is_bar=True),
        Column(amount, is_number=True, origin="model"),
    )
    return table(columns, rows, caption=caption)


def _front(result: "AnyPlan") -> PageSection:
    columns = (
        Column("slice"),
        Column("time", is_number=True, origin="model"),
        Column("cost", is_number=True, origin="model"),
        Column("how"),
    )
    rows: list[Sequence[Child]] = [
        (_slice(one), days_text(one.days), money_text(one), write_mesh(one.mesh))
        for one in result.front
    ]
    words = f"Nothing is both faster and cheaper than these{front_words(result)}."
    return section("Pareto front", table(columns, rows, caption="Fastest first"), intro=words)
