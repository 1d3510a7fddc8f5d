"""Rows for spans: on one row they follow or enclose each other, they never cross."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ...compiler.timeline import Span

# The order in which a person reads them, with what each shows.
TRACK_TITLES = {
    "core": "Core (MXU and VPU)",
    "hbm": "HBM DMA",
    "ici": "ICI",
    "dcn": "DCN",
    "host": "Host link",
}
# Only the core runs things inside each other: ops inside loops.
NESTING_TRACKS = ("core",)


@dataclass(frozen=True)
class Lane:
    """One row of a track.

    Attributes:
        number: 0 for the first row of the track.
        spans: (start, end, span) in nanoseconds, by start, the enclosing one first.
    """

    track: str
    number: int
    spans: tuple[tuple[int, int, Span], ...]

    @property
    def title(self) -> str:
        """The name of the row."""
        title = track_title(self.track)
        return title if self.number == 0 else f"{title} #{self.number + 1}"


def track_title(track: str) -> str:
    """What a person calls a track; "ici x" is the x axis of "ici"."""
    kind, _, axis = track.partition(" ")
    title = TRACK_TITLES.get(kind, kind)
    return f"{title} {axis}" if axis else title


def _rank(track: str) -> int:
    known = list(TRACK_TITLES)
    kind = track.partition(" ")[0]
    return known.index(kind) if kind in known else len(known)


def split_into_lanes(spans: Sequence[Span]) -> list[Lane]:
    """Lay out spans, tracks in reading order, with as few rows as a greedy pass finds."""
    tracks: defaultdict[str, list[tuple[int, int, Span]]] = defaultdict(list)
    for span in spans:
        tracks[span.track].append((*nanoseconds(span), span))
    order = sorted(tracks, key=lambda track: (_rank(track), track))
    return [
        Lane(track, number, tuple(row))
        for track in order
        for number, row in enumerate(_rows(tracks[track], nest=track in NESTING_TRACKS))
    ]


def nanoseconds(span: Span) -> tuple[int, int]:
    """Start and end; both are rounded, so that what touches or nests still does."""
    return round(span.start_s * 1e9), round((span.start_s + span.duration_s) * 1e9)


def _rows(spans: list[tuple[int, int, Span]], *, nest: bool) -> list[list[tuple[int, int, Span]]]:
    rows: list[list[tuple[int, int, Span]]] = []
    open_until: list[list[int]] = []
    # A loop goes before the op that opens it, also where both are equally long.
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
