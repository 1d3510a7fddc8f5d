"""The parts of sections: badges, cards, tables, lists, notes, commands."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..hardware.figure import ORIGINS
from .markup import Child, Markup, join, slug, tag

Mood = Literal["good", "bad", "unsure"]
ROWS_OPEN = 12


@dataclass(frozen=True)
class PageSection:
    """A part of a page with a heading and a link in the menu."""

    title: str
    body: Markup

    @property
    def anchor(self) -> str:
        """The section's anchor in an address."""
        return slug(self.title)

    @property
    def markup(self) -> Markup:
        """The section as markup."""
        return tag("section", tag("h2", self.title), self.body, id=self.anchor)


def section(title: str, *children: Child, intro: Child = "") -> PageSection:
    """Return a section with an introduction and children."""
    lead = tag("p", intro, class_="intro") if intro else ""
    return PageSection(title, join(lead, *children))


def headline(
    subject: str,
    rest: str,
    *,
    lead: Child = "",
    verdict: tuple[str, Mood] | None = None,
    cards: Sequence[Markup] = (),
) -> Markup:
    """Return the top of a page: verdict, subject, lead and main figures.

    Args:
        subject: The subject of the page.
        rest: Text after the subject, less prominent.
        lead: The result in a sentence.
        verdict: The result in a word, and its mood.
        cards: Figures, each a `card`.
    """
    word = tag("span", verdict[0], class_=f"verdict {verdict[1]}") if verdict else ""
    return tag(
        "header",
        tag("h1", word, " " if word else "", subject, tag("span", f" {rest}", class_="rest")),
        tag("p", lead, class_="lead") if lead else "",
        tag("div", cards, class_="cards") if cards else "",
        class_="headline",
    )


def card(title: str, value: str, below: str, origin: str = "") -> Markup:
    """Return one figure of the headline."""
    return tag(
        "div",
        tag("div", title, " ", badge(origin) if origin else "", class_="card-title"),
        tag("div", value, class_="card-value"),
        tag("div", below, class_="card-below"),
        class_="card",
    )


def badge(origin: str) -> Markup:
    """Return a badge with a number's origin."""
    title = ORIGINS.get(origin, origin)
    return tag("span", origin, class_=f"badge from-{slug(origin)}", title=title)


def absent(reason: str) -> Markup:
    """Return a paragraph on why something is missing."""
    return tag("p", reason, class_="absent")


def warning(*children: Child) -> Markup:
    """Return a highlighted note."""
    return tag("p", *children, class_="warning")


def code(text: str) -> Markup:
    """Return text in a fixed-width font."""
    return tag("code", text)


def command(text: str) -> Markup:
    """Return a command with a button that copies it."""
    copy = tag("button", "Copy", type="button", class_="script-only", data_copy=text)
    return tag("div", tag("pre", code(text)), copy, class_="command")


def definitions(entries: Iterable[tuple[Child, Child]]) -> Markup:
    """Return a list of terms and definitions."""
    return tag("dl", [join(tag("dt", term), tag("dd", what)) for term, what in entries])


def bullets(lines: Iterable[Child]) -> Markup:
    """Return a bullet list."""
    return tag("ul", [tag("li", line) for line in lines])


def colored(kind: str, words: str) -> Markup:
    """Return a text after a swatch of its color."""
    swatch = tag("span", class_=f"swatch {kind}", aria_hidden="true")
    return tag("span", swatch, words, class_="nowrap")


def legend(kinds: Mapping[str, str]) -> Markup:
    """Return a legend of colors, by CSS class and text."""
    entries = [tag("li", colored(kind, words)) for kind, words in kinds.items()]
    return tag("ul", entries, class_="legend")


@dataclass(frozen=True)
class Column:
    """A column of a table; numbers are aligned to the right, bars take the free width."""

    title: str
    is_number: bool = False
    is_bar: bool = False
    origin: str = ""

    @property
    def css_class(self) -> str | None:
        """The CSS class of its cells."""
        return "number" if self.is_number else "bar-cell" if self.is_bar else None


def table(columns: Sequence[Column], rows: Iterable[Sequence[Child]], *, caption: str) -> Markup:
    """Return a table that scrolls sideways on a narrow screen, also by keyboard."""
    head = [
        tag(
            "th",
            column.title,
            (" ", badge(column.origin)) if column.origin else "",
            scope="col",
            class_=column.css_class,
        )
        for column in columns
    ]
    body = [
        tag(
            "tr",
            [
                tag("td", cell, class_=column.css_class)
                for column, cell in zip(columns, row, strict=True)
            ],
        )
        for row in rows
    ]
    inside = tag(
        "table", tag("caption", caption), tag("thead", tag("tr", head)), tag("tbody", body)
    )
    return tag("div", inside, class_="scroll", tabindex="0", role="region", aria_label=caption)


def long_table(
    columns: Sequence[Column], rows: Sequence[Sequence[Child]], *, caption: str, rest: str
) -> Markup:
    """Return a table that shows its first rows and folds the others."""
    first = table(columns, rows[:ROWS_OPEN], caption=caption)
    if len(rows) <= ROWS_OPEN:
        return first
    words = f"{len(rows) - ROWS_OPEN} {rest}"
    hidden = table(columns, rows[ROWS_OPEN:], caption=words)
    return join(first, tag("details", tag("summary", words), hidden))
