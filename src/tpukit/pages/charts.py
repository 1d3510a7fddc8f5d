"""Drawings in SVG that take their colors from the style sheet and need no script."""

from collections.abc import Sequence
from dataclasses import dataclass

from .markup import Markup, tag

BAR_HEIGHT, MARKS_HEIGHT = 28, 24


@dataclass(frozen=True)
class BarPiece:
    """A part of a bar: its CSS class, its amount, and its tooltip."""

    kind: str
    amount: float
    words: str


@dataclass(frozen=True)
class BarMark:
    """A position on a bar, with a text below it, a line for a limit, or both."""

    amount: float
    words: str = ""
    is_limit: bool = False


def stacked_bar(
    pieces: Sequence[BarPiece], *, whole: float, label: str, marks: Sequence[BarMark] = ()
) -> Markup:
    """Return a bar of pieces one after another, with marks below.

    Positions are percentages, so that the bar stretches with the page and its text does not.
    """
    drawn: list[Markup] = []
    reached = 0.0
    for piece in pieces:
        drawn.append(
            tag(
                "rect",
                tag("title", piece.words),
                x=_percent(reached, whole),
                width=_percent(piece.amount, whole),
                height=BAR_HEIGHT,
                class_=piece.kind,
            )
        )
        reached += piece.amount
    for mark in marks:
        drawn += _mark(mark, whole)
    height = BAR_HEIGHT + (MARKS_HEIGHT if any(mark.words for mark in marks) else 0)
    return tag("svg", drawn, height=height, class_="bar", role="img", aria_label=label)


def coordinate(value: float) -> str:
    """Return a position in a drawing as short text."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _mark(mark: BarMark, total: float) -> list[Markup]:
    x = _percent(mark.amount, total)
    share = mark.amount / total if total else 0.0
    anchor = "start" if share < 0.1 else "end" if share > 0.9 else "middle"
    kind = "mark limit" if mark.is_limit else "mark"
    drawn: list[Markup] = []
    if mark.is_limit:
        drawn.append(tag("line", x1=x, x2=x, y1=0, y2=BAR_HEIGHT + 4, class_="bar-limit"))
    if mark.words:
        y = BAR_HEIGHT + 18
        drawn.append(tag("text", mark.words, x=x, y=y, text_anchor=anchor, class_=kind))
    return drawn


def _percent(amount: float, total: float) -> str:
    return coordinate(100 * amount / total if total else 0.0) + "%"
