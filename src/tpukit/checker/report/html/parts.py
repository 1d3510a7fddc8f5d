"""What every section of the page is made of: badges, figures, tables, bars, notes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .markup import Html, coordinate, join, slug, tag

ORIGINS = {
    "measured": "timed on this machine or taken from a published measurement",
    "compiler": "read from what the TPU compiler wrote for this very program",
    "model": "predicted by tpukit's step-time model",
    "datasheet": "published by the maker of the chip",
}
BAR_HEIGHT = 32
ROWS_OPEN = 12


def badge(origin: str) -> Html:
    """Where a number comes from."""
    return tag(
        "span", origin, class_=f"badge from-{slug(origin)}", title=ORIGINS.get(origin, origin)
    )


def section(title: str, *children: "str | Iterable[str]", intro: "str | Html" = "") -> Html:
    """A part of the page with an anchor for the menu."""
    heading = tag("h2", title)
    lead = tag("p", intro, class_="intro") if intro else ""
    return tag("section", heading, lead, *children, id=slug(title))


def absent(reason: str) -> Html:
    """Why something is not here."""
    return tag("p", reason, class_="absent")


@dataclass(frozen=True)
class Column:
    """A column of a table; `is_number` aligns it to the right."""

    title: str
    is_number: bool = False
    origin: str = ""


def table(
    columns: Sequence[Column], rows: Iterable[Sequence["str | Html"]], *, caption: str
) -> Html:
    """A table that scrolls sideways on a narrow screen, reachable by keyboard."""
    head = tag(
        "tr",
        *(
            tag(
                "th",
                column.title,
                " " if column.origin else "",
                badge(column.origin) if column.origin else "",
                scope="col",
                class_="number" if column.is_number else None,
            )
            for column in columns
        ),
    )
    body = [
        tag(
            "tr",
            *(
                tag("td", cell, class_="number" if column.is_number else None)
                for column, cell in zip(columns, row, strict=True)
            ),
        )
        for row in rows
    ]
    inside = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", body))
    return tag("div", inside, class_="scroll", tabindex="0", role="region", aria_label=caption)


def long_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence["str | Html"]],
    *,
    caption: str,
    rest: str,
) -> Html:
    """A table whose first rows are open and whose others are one click away."""
    first = table(columns, rows[:ROWS_OPEN], caption=caption)
    if len(rows) <= ROWS_OPEN:
        return first
    words = f"{len(rows) - ROWS_OPEN} {rest}"
    hidden = table(columns, rows[ROWS_OPEN:], caption=words)
    return join(first, tag("details", tag("summary", words), hidden))


def colored(kind: str, words: str) -> Html:
    """A kind of memory or time, with its colour before it."""
    swatch = tag("span", class_=f"swatch {kind}", aria_hidden="true")
    return tag("span", swatch, words, class_="kind")


def stacked_bar(
    pieces: Sequence[tuple[str, float, str]],
    *,
    whole: float,
    label: str,
    marks: Sequence[tuple[float, str, str]] = (),
) -> Html:
    """A bar of (class, amount, what to say on hover), with (amount, class, text) written below.

    Places are percentages, so that the bar stretches with the page and its letters do not.
    """
    drawn: list[Html] = []
    reached = 0.0
    for kind, amount, words in pieces:
        title = tag("title", words)
        drawn.append(
            tag(
                "rect",
                title,
                x=_percent(reached, whole),
                width=_percent(amount, whole),
                height=BAR_HEIGHT,
                class_=kind,
            )
        )
        reached += amount
    for amount, kind, words in marks:
        x = _percent(amount, whole)
        share = amount / whole if whole else 0.0
        anchor = "start" if share < 0.1 else "end" if share > 0.9 else "middle"
        if kind == "limit":
            drawn.append(tag("line", x1=x, x2=x, y1=0, y2=BAR_HEIGHT + 5, class_="bar-limit"))
        drawn.append(
            tag("text", words, x=x, y=BAR_HEIGHT + 18, text_anchor=anchor, class_=f"mark {kind}")
        )
    return tag("svg", drawn, class_="bar", role="img", aria_label=label)


def _percent(amount: float, whole: float) -> str:
    return coordinate(100 * amount / whole if whole else 0.0) + "%"


def code(text: str) -> Html:
    """A name or a command."""
    return tag("code", text)


def op_cell(name: str, where: str, source: str | None = None) -> Html:
    """An op: its name, where in the user's program it is from, the line of source."""
    # A path may break behind its slashes rather than anywhere.
    pieces = where.split("/")
    path = join(*(join(piece, "/", Html("<wbr>")) for piece in pieces[:-1]), pieces[-1])
    return tag(
        "div",
        code(name) if name else "",
        tag("div", path, class_="path") if where else "",
        tag("div", source, class_="source") if source else "",
        class_="op",
    )
