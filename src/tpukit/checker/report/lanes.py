"""Arrange spans in rows without crossings, and fold loops to one iteration.

A simulation shows a loop's body in its first iteration and leaves the others empty. Folding removes
the empty intervals from the axis, so that a layer is visible beside what runs once per step.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...compiler.timeline import TrackSpan

# Titles of tracks, in reading order.
TRACK_TITLES = {
    "core": "Core (MXU and VPU)",
    "hbm": "HBM DMA",
    "ici": "ICI",
    "dcn": "DCN",
    "host": "Host link",
}
# Only spans of the core nest, because ops run inside loops.
NESTING_TRACKS = ("core",)


@dataclass(frozen=True)
class Lane:
    """One row of a track.

    Attributes:
        number: Row within the track, from 0.
        spans: (start, end, span) in nanoseconds, sorted by start, enclosing spans first.
    """

    track: str
    number: int
    spans: tuple[tuple[int, int, TrackSpan], ...]

    @property
    def title(self) -> str:
        """The title of the row."""
        title = track_title(self.track)
        return title if self.number == 0 else f"{title} #{self.number + 1}"


def track_title(track: str) -> str:
    """Return the title of a track; "ici x" is the x axis of "ici"."""
    kind, _, axis = track.partition(" ")
    title = TRACK_TITLES.get(kind, kind)
    return f"{title} {axis}" if axis else title


def _rank(track: str) -> int:
    known = list(TRACK_TITLES)
    kind = track.partition(" ")[0]
    return known.index(kind) if kind in known else len(known)


def split_into_lanes(spans: Sequence[TrackSpan]) -> list[Lane]:
    """Assign spans to rows greedily, with tracks in reading order."""
    tracks: defaultdict[str, list[tuple[int, int, TrackSpan]]] = defaultdict(list)
    for span in spans:
        tracks[span.track].append((*nanoseconds(span), span))
    order = sorted(tracks, key=lambda track: (_rank(track), track))
    return [
        Lane(track, number, tuple(row))
        for track in order
        for number, row in enumerate(_rows(tracks[track], nest=track in NESTING_TRACKS))
    ]


def nanoseconds(span: TrackSpan) -> tuple[int, int]:
    """Return start and end, both rounded, so that spans that touch or nest still do."""
    return round(span.start_s * 1e9), round((span.start_s + span.duration_s) * 1e9)


def _rows(
    spans: list[tuple[int, int, TrackSpan]], *, nest: bool
) -> list[list[tuple[int, int, TrackSpan]]]:
    rows: list[list[tuple[int, int, TrackSpan]]] = []
    open_until: list[list[int]] = []
    # A loop comes before the op that starts it, even if both are equally long.
    for entry in sorted(spans, key=lambda one: (one[0], -one[1], one[2].cause != "loop")):
        start, end, _ = entry
        for row, ends in zip(rows, open_until, strict=True):
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or (nest and end <= ends[-1]):
                row.append(entry)
                ends.append(end)
                break
        else:
            rows.append([entry])
            open_until.append([end])
    return rows


@dataclass(frozen=True)
class Loop:
    """A loop of the program.

    Attributes:
        iterations: Iterations per run of the loop.
        iteration_s: Seconds per iteration.
    """

    span: TrackSpan
    iterations: int

    @property
    def iteration_s(self) -> float:
        """Seconds per iteration."""
        return self.span.duration_s / self.iterations

    @property
    def end_s(self) -> float:
        """The end of the last iteration."""
        return self.span.start_s + self.span.duration_s


def find_loops(spans: Sequence[TrackSpan]) -> list[Loop]:
    """Return every loop of the core's track with its number of iterations, in order of time."""
    core = sorted(
        (span for span in spans if span.track == "core"),
        key=lambda span: (span.start_s, -span.duration_s),
    )
    starts = [span.start_s for span in core]
    loops: list[Loop] = []
    for span in core:
        if span.cause != "loop":
            continue
        first = bisect_right(starts, span.start_s - span.duration_s * 1e-9)
        last = bisect_right(starts, span.start_s + span.duration_s * (1 - 1e-9))
        inside = [one.times for one in core[first:last] if one.times > span.times]
        # Ops in inner loops run more often still, so the minimum belongs to the body itself.
        loops.append(Loop(span, min(inside) // span.times if inside else 1))
    return loops


@dataclass(frozen=True)
class FoldedAxis:
    """A time axis without the iterations of loops after the first.

    Attributes:
        cuts: Removed intervals (start, end), sorted and disjoint.
    """

    cuts: tuple[tuple[float, float], ...]
    _starts: tuple[float, ...] = field(repr=False, default=())
    _removed: tuple[float, ...] = field(repr=False, default=())

    @classmethod
    def of(cls, loops: Sequence[Loop]) -> "FoldedAxis":
        """Return the axis that shows each loop once."""
        wanted = sorted(
            (loop.span.start_s + loop.iteration_s, loop.end_s)
            for loop in loops
            if loop.iterations > 1
        )
        cuts: list[tuple[float, float]] = []
        for start, end in wanted:
            if cuts and start < cuts[-1][1]:
                cuts[-1] = (cuts[-1][0], max(cuts[-1][1], end))
            else:
                cuts.append((start, end))
        removed = [0.0]
        for start, end in cuts:
            removed.append(removed[-1] + end - start)
        return cls(tuple(cuts), tuple(start for start, _ in cuts), tuple(removed))

    def place(self, seconds: float) -> float:
        """Return the position of a moment on the folded axis."""
        count = bisect_right(self._starts, seconds)
        if not count:
            return seconds
        start, end = self.cuts[count - 1]
        return min(seconds, start) - self._removed[count - 1] + max(0.0, seconds - end)


def later_turns(loops: Sequence[Loop]) -> list[TrackSpan]:
    """Return one span per loop for the iterations that the simulation leaves empty."""
    nanosecond = 1e-9  # apart from the first iteration, so that rounding never lets them cross
    return [
        replace(
            loop.span,
            name=_more(loop.iterations - 1, loop.span.name),
            start_s=loop.span.start_s + loop.iteration_s + nanosecond,
            duration_s=max(0.0, loop.span.duration_s - loop.iteration_s - nanosecond),
        )
        for loop in loops
        if loop.iterations > 1
    ]


def _more(count: int, name: str) -> str:
    return f"{count} more iteration{'s' * (count > 1)} of {name}"
