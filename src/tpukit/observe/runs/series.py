"""A metric over steps or time, thinned to what a screen can show without hiding its extremes."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...shown import Shown

Axis = Literal["step", "time"]
Numbers = np.ndarray[Any, np.dtype[np.float64]]
# A silence is a gap in a series over time when it is this many times the usual distance of points.
GAP = 20


@dataclass(frozen=True)
class Series(Shown):
    """Points of one metric (origin: measured).

    Attributes:
        metric: Its name.
        by: What `x` is: steps, or unix seconds.
        x: In the order of the file.
        y: NaN where the value was not finite, or where nothing was written for long.
        total: Points there are in the file between `start` and `end`, before thinning.
    """

    metric: str
    by: Axis
    x: Numbers
    y: Numbers
    total: int

    def __len__(self) -> int:
        return len(self.x)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; None stands for a gap."""
        return {
            "metric": self.metric,
            "by": self.by,
            "x": self.x.tolist(),
            "y": [value if np.isfinite(value) else None for value in self.y.tolist()],
            "total": self.total,
            "origin": "measured",
        }


def make_series(
    metric: str,
    x: Numbers,
    y: Numbers,
    *,
    by: Axis,
    points: int,
    start: float | None = None,
    end: float | None = None,
) -> Series:
    """Return the part of a metric between two places, thinned to at most `points` points.

    The points are divided into as many runs of neighbours as there is room for. Each keeps its
    least and its greatest value where they are, and a gap if it has one, so that a spike of one
    step in ten million is seen.
    """
    low, high = -np.inf if start is None else start, np.inf if end is None else end
    inside = (x >= low) & (x <= high) & np.isfinite(x)  # a place that is not known is nowhere
    if not inside.all():
        x, y = x[inside], y[inside]
    total = len(x)
    y = np.where(np.isfinite(y), y, np.nan)
    kept = thin(y, points)
    x, y = x[kept], y[kept]
    if by == "time":
        x, y = _with_gaps(x, y)
    return Series(metric, by, x, y, total)


def thin(y: Numbers, points: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return which of the values to keep: first, last, and the extremes and gaps of each run."""
    count, points = len(y), max(points, 8)
    if count <= points:
        return np.arange(count)
    missing = np.isnan(y)
    each = 3 if missing.any() else 2
    runs = (points - 2) // each
    width = -(-count // runs)
    whole = count // width * width
    kept = [np.array([0, count - 1])]
    for begin, end in ((0, whole), (whole, count)):
        if end > begin:
            block = y[begin:end].reshape(-1, min(width, end - begin))
            gaps = missing[begin:end].reshape(block.shape)
            at = begin + np.arange(len(block)) * block.shape[1]
            kept.append(at + np.where(gaps, np.inf, block).argmin(axis=1))
            kept.append(at + np.where(gaps, -np.inf, block).argmax(axis=1))
            kept.append((at + gaps.argmax(axis=1))[gaps.any(axis=1)])
    return np.unique(np.concatenate(kept))


def _with_gaps(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
    """Put a NaN into every silence."""
    if len(x) < 3:
        return x, y
    apart = np.diff(x)
    silent = np.flatnonzero(apart > GAP * max(float(np.median(np.abs(apart))), 1.0))
    return (
        np.insert(x, silent + 1, (x[silent] + x[silent + 1]) / 2),
        np.insert(y, silent + 1, np.nan),
    )
