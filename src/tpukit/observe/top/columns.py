"""What the table of chips shows, and which way is bad."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...hardware.missing import DASH

Values = Mapping[str, float]
GIB = 2**30


@dataclass(frozen=True)
class FigureColumn:
    """One figure of every chip or host.

    Attributes:
        title: Short, for 80 columns.
        metric: A name of the glossary.
        text: How a value is written.
        worst: Which of several hosts to name: the one with the greatest value, or with the least.
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
    """41 %: shares are 0 to 1 inside."""
    return f"{value * 100:.0f} %"


def gib(value: float) -> str:
    """12.3 (GiB)."""
    return f"{value / GIB:.1f}"


def seconds(value: float) -> str:
    """2.1 s, 3.4 ms."""
    return f"{value:.1f} s" if value >= 1 or value == 0 else f"{value * 1e3:.3g} ms"


def plain_number(value: float) -> str:
    """As short as it goes."""
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
# Told of when missing: what one looks at first. The others are simply not shown.
EXPECTED = ("memory_used", "duty_cycle", "tensorcore_utilization", "memory_bandwidth_utilization")


def shown(columns: Sequence[FigureColumn], rows: Sequence[Values]) -> list[FigureColumn]:
    """Return the columns that have a figure in some row."""
    return [column for column in columns if any(column.metric in values for values in rows)]
