"""Bars and sparklines of text, in ASCII where the terminal knows no more."""

import itertools
import math
from collections.abc import Sequence

from rich.text import Text

BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#@"
WARM, HOT = 0.75, 0.92  # of a bar


def sparkline(
    values: Sequence[float],
    width: int,
    *,
    low: float | None = None,
    high: float | None = None,
    ascii_only: bool = False,
) -> str:
    """Return the newest values as one letter each; a blank where one is not finite.

    Args:
        values: Oldest first; where there are more than `width`, each letter is the mean of some.
        width: The most letters.
        low: What the lowest letter stands for; the least value by default.
        high: The same for the highest.
        ascii_only: Whether to draw with letters every terminal has.
    """
    letters = ASCII if ascii_only else BLOCKS
    thinned = _thinned(values, width)
    finite = [value for value in thinned if math.isfinite(value)]
    if not finite:
        return ""
    bottom = min(finite) if low is None else low
    span = (max(finite) if high is None else high) - bottom
    drawn: list[str] = []
    for value in thinned:
        if not math.isfinite(value):
            drawn.append(" ")
            continue
        place = min(1.0, max(0.0, (value - bottom) / span)) if span > 0 else 0.0
        drawn.append(letters[min(len(letters) - 1, int(place * len(letters)))])
    return "".join(drawn)


def bar(share: float, width: int, *, ascii_only: bool = False) -> Text:
    """Return a bar that is filled to a share of it."""
    full = round(min(1.0, max(0.0, share)) * width)
    on, off = ("#", ".") if ascii_only else ("█", "░")
    style = "red" if share >= HOT else "yellow" if share >= WARM else "green"
    return Text().append(on * full, style=style).append(off * (width - full), style="dim")


def _thinned(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [place * len(values) // width for place in range(width + 1)]
    return [sum(values[begin:end]) / (end - begin) for begin, end in itertools.pairwise(edges)]
