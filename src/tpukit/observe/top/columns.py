"""Columns, bars and sparklines of the chip table."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from ...hardware.missing import DASH

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
    """Return the newest values as one character each; a blank for one that is not finite.

    Args:
        values: Oldest first; more than `width` values are averaged per character.
        width: The most characters.
        low: Value of the lowest character; the least value by default.
        high: Value of the highest character; the greatest value by default.
        ascii_only: Whether to use ASCII characters only.
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
    """Return a bar that is filled to a share."""
    full = round(min(1.0, max(0.0, share)) * width)
    on, off = ("#", ".") if ascii_only else ("█", "░")
    style = "red" if share >= HOT else "yellow" if share >= WARM else "green"
    return Text().append(on * full, style=style).append(off * (width - full), style="dim")


def _thinned(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [place * len(values) // width for place in range(width + 1)]
    return [sum(values[begin:end]) / (end - begin) for begin, end in itertools.pairwise(edges)]


Values = Mapping[str, float]
GIB = 2**30


@dataclass(frozen=True)
class FigureColumn:
    """One figure of every chip or host.

    Attributes:
        title: Short, for 80 columns.
        metric: A name of `METRICS`.
        text: Formats a value.
        worst: Whether the greatest or the least value is the worst.
    """

    title: str
    metric: str
    text: Callable[[float], str]
    worst: Callable[[Sequence[float]], float] = max

    def cell(self, values: Values) -> str:
        """Return the figure, or a dash."""
        value = values.get(self.metric)
        return DASH if value is None else self.text(value)


def percent(value: float) -> str:
    """Return a share as percent: 41 %."""
    return f"{value * 100:.0f} %"


def gib(value: float) -> str:
    """Return bytes as GiB: 12.3."""
    return f"{value / GIB:.1f}"


def seconds(value: float) -> str:
    """Return seconds with their unit: 2.1 s, 3.4 ms."""
    return f"{value:.1f} s" if value >= 1 or value == 0 else f"{value * 1e3:.3g} ms"


def plain_number(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:.3g}"


MEMORY = FigureColumn("memory", "memory_used", gib)
CHIP_COLUMNS = (
    FigureColumn("duty", "duty_cycle", percent, min),
    FigureColumn("TC", "tensorcore_utilization", percent, min),
    FigureColumn("HBM bw", "memory_bandwidth_utilization", percent, min),
    FigureColumn("queue", "hlo_queue_size", plain_number, min),
    FigureColumn("idle", "idle_seconds", seconds),
    FigureColumn("W", "power_watts", lambda value: f"{value:.0f}"),
    FigureColumn("°C", "temperature_celsius", lambda value: f"{value:.0f}"),
    FigureColumn("thr", "throttle_score", plain_number),
    FigureColumn("link", "ici_link_health", plain_number),
)
HOST_COLUMNS = (
    FigureColumn("CPU", "host_cpu_utilization", percent),
    FigureColumn("DCN", "dcn_latency_seconds", seconds),
)
# Reported when missing; other columns without figures are not shown.
EXPECTED = ("memory_used", "duty_cycle", "tensorcore_utilization", "memory_bandwidth_utilization")


def shown(columns: Sequence[FigureColumn], rows: Sequence[Values]) -> list[FigureColumn]:
    """Return the columns that have a figure in some row."""
    return [column for column in columns if any(column.metric in values for values in rows)]
