"""A plan as one self-contained page, made of the parts of the compiler's own report."""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from ...checker.report.html.markup import Html, join, tag
from ...checker.report.html.parts import (
    Column,
    absent,
    badge,
    code,
    colored,
    section,
    stacked_bar,
    table,
)
from ...checker.report.wording import bytes_text, seconds_text
from ..cost.step_split import CAUSES
from .amounts import count_text, days_text
from .choice import Choice
from .report import batch_text, mesh_text, money_text, remat_text, verdict_line

if TYPE_CHECKING:
    from .result import PlanResult

# Causes and purposes, as the style sheet of the report names their colours.
_CAUSE_CLASS = {"attention": "c-kernel", "bubble": "c-overhead"}
_PURPOSES = (
    ("weights", "p-parameters"),
    ("gradients", "p-gradients"),
    ("optimizer", "p-optimizer-state"),
    ("activations", "p-activations"),
    ("temporaries", "p-temporaries"),
)


def render_page(result: "PlanResult") -> str:
    """The page as text; nothing on it runs and no request leaves it."""
    style = (files("tpukit.checker.report.html") / "assets" / "report.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'"
    subject = result.ask.subject
    head = tag(
        "head",
        Html('<meta charset="utf-8"/>'),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"Plan for {subject.name}"),
        tag("style", Html(style)),
    )
    mood = "good" if result.feasible else "bad"
    word = result.ask.objective.upper() if result.feasible else "NOT AS ASKED"
    top = tag(
        "header",
        tag(
            "h1",
            tag("span", word, class_=f"verdict {mood}"),
            " ",
            tag("span", subject.name, class_="program"),
            tag("span", f" on {count_text(result.ask.tokens)} tokens", class_="slice"),
        ),
        tag("p", verdict_line(result).plain.removeprefix(word).strip(), class_="lead"),
        class_="headline",
    )
    body = tag(
        "body",
        tag("main", top, _sections(result), id="content"),
        tag("footer", "Made by tpukit plan, without a TPU."),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _sections(result: "PlanResult") -> list[Html]:
    shown = [_choices("Choices", result.choices, result)]
    if result.unpriced:
        shown.append(_choices("Without a price", result.unpriced, result))
    if len(result.front) > 1:
        shown.append(_front(result))
    if result.rejected:
        rows = [(one.what, one.reason) for one in result.rejected]
        columns = (Column("slices"), Column("why", origin="model"))
        shown.append(section("Left out", table(columns, rows, caption="Slices left out")))
    if result.disagreements:
        notes = tag("ul", [tag("li", note) for note in result.disagreements])
        shown.append(section("What the compiler says otherwise", notes))
    assumed = tag("ul", [tag("li", line) for line in result.assumptions])
    shown.append(section("Assumed", assumed))
    if result.next_command:
        shown.append(section("Next", tag("p", code(result.next_command))))
    return shown


def _choices(title: str, choices: Sequence[Choice], result: "PlanResult") -> Html:
    if not choices:
        return section(title, absent(result.shortfall))
    columns = (
        Column("slice"),
        Column("cost", is_number=True),
        Column("time", is_number=True),
        Column("step", is_number=True),
        Column("tokens/s/chip", is_number=True),
        Column("HBM a device", is_number=True),
        Column("how"),
    )
    rows = [
        (
            code(str(choice.target)),
            money_text(choice),
            days_text(choice.days),
            seconds_text(choice.step_time_s),
            f"{choice.tokens_per_s_per_chip:,.0f}",
            join(bytes_text(choice.memory_bytes), " ", badge(choice.memory_origin)),
            f"{mesh_text(choice)}, batch {batch_text(choice)}, {remat_text(choice)}",
        )
        for choice in choices
    ]
    causes = tag("p", *(colored(_cause_class(cause), f"{cause} ") for cause in CAUSES))
    purposes = tag("p", *(colored(f"purpose {kind}", f"{name} ") for name, kind in _PURPOSES))
    return section(
        title,
        table(columns, rows, caption="Best first"),
        tag("h3", "Where a step's time goes ", badge("model")),
        causes,
        [_time_bar(choice) for choice in choices],
        tag("h3", "What is in the memory of one device ", badge("model")),
        purposes,
        [_memory_bar(choice) for choice in choices],
        intro=join("Cost, time and step have origin ", badge("model"), "."),
    )


def _time_bar(choice: Choice) -> Html:
    pieces = [
        (_cause_class(cause), seconds, f"{cause}: {seconds_text(seconds)}")
        for cause, seconds in choice.seconds_by_cause.items()
        if seconds
    ]
    whole = sum(choice.seconds_by_cause.values())
    label = f"Where the step goes on {choice.target}"
    words = tag("p", f"{choice.target}: {seconds_text(whole)}")
    return join(words, stacked_bar(pieces, whole=whole, label=label))


def _memory_bar(choice: Choice) -> Html:
    pieces = [
        (
            f"purpose {kind}",
            choice.memory[purpose],
            f"{purpose}: {bytes_text(choice.memory[purpose])}",
        )
        for purpose, kind in _PURPOSES
    ]
    marks = [(choice.usable_bytes, "limit", bytes_text(choice.usable_bytes))]
    whole = max(choice.usable_bytes, choice.memory["total"])
    label = f"HBM of one device of {choice.target}"
    words = tag("p", f"{choice.target}: {bytes_text(choice.memory['total'])}")
    return join(words, stacked_bar(pieces, whole=whole, label=label, marks=marks))


def _front(result: "PlanResult") -> Html:
    columns = (Column("slice"), Column("time", is_number=True), Column("cost", is_number=True))
    rows = [(str(one.target), days_text(one.days), money_text(one)) for one in result.front]
    words = "Nothing is both faster and cheaper than these."
    return section("Pareto front", table(columns, rows, caption="Fastest first"), intro=words)


def _cause_class(cause: str) -> str:
    return _CAUSE_CLASS.get(cause, f"c-{cause}")
