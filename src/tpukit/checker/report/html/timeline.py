"""The page's timeline of one step: its layout, a static picture, and data for the script."""

from collections.abc import Sequence
from dataclasses import dataclass

from ....compiler.memory.reading import short_op_name
from ....compiler.timeline import TrackSpan
from ....hardware.figure import seconds_text
from ....pages.charts import coordinate
from ....pages.markup import Markup, join, tag
from ....pages.parts import PageSection, absent, badge, legend, section
from ....plain_data import JsonObject
from ..lanes import (
    NESTING_TRACKS,
    FoldedAxis,
    Lane,
    Loop,
    find_loops,
    nanoseconds,
    split_into_lanes,
    track_title,
)
from .time import BOUND_BY

SPANS_KEPT = 12_000
_UNITS = 1000
_PICTURE_SPANS = 400
_CORE_ROW, _OTHER_ROW, _GAP = 22, 9, 8
_CAUSES = {**BOUND_BY, "loop": "a loop"}


@dataclass(frozen=True)
class Placed:
    """A span with its track and row; rows of a track count from 0."""

    track: int
    row: int
    span: TrackSpan


def timeline_section(spans: Sequence[TrackSpan]) -> PageSection:
    """Return the section with the timeline, its controls and its legend."""
    if not spans:
        return section("Timeline", absent("This report was kept without its timeline."))
    kept = sorted(spans, key=lambda span: -span.duration_s * span.times)[:SPANS_KEPT]
    left_out = len(spans) - len(kept)
    loops = find_loops(spans)
    axis = FoldedAxis.of(loops)
    causes = {span.cause for span in kept}
    kinds = {f"c-{cause}": words for cause, words in _CAUSES.items() if cause in causes}
    note = f" The {left_out:,} shortest ops are left out." if left_out else ""
    return section(
        "Timeline",
        _controls(),
        tag(
            "div",
            _picture(kept, axis),
            id="timeline-view",
            class_="timeline",
            tabindex="0",
            role="application",
            aria_label="timeline of one step; arrow keys select, plus and minus zoom",
        ),
        legend(kinds),
        tag(
            "div",
            "Point at an op, or press an arrow key.",
            id="timeline-details",
            class_="details",
            aria_live="polite",
        ),
        intro=join(_intro(loops, len(kept)), note, " ", badge("model")),
    )


def timeline_data(spans: Sequence[TrackSpan], memory: Sequence[Sequence[float]] = ()) -> JsonObject:
    """Return the script's data: spans in nanoseconds, texts by number, and live HBM."""
    kept = sorted(spans, key=lambda span: -span.duration_s * span.times)[:SPANS_KEPT]
    loops = find_loops(spans)
    iterations = {loop.span: loop.iterations for loop in loops}
    axis = FoldedAxis.of(loops)
    titles, placed = lay_out(kept)
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    rows: list[list[float]] = []
    for one in placed:
        span = one.span
        start, end = nanoseconds(span)
        folded = [
            round(axis.place(at) * 1e9) for at in (span.start_s, span.start_s + span.duration_s)
        ]
        rows.append(
            [
                *(one.track, one.row, start, end - start, folded[0], folded[1] - folded[0]),
                *(number(span.cause), number(span.name), number(short_op_name(span.op_name))),
                *(span.flops, span.bytes, span.times, iterations.get(span, 1)),
            ]
        )
    return {
        "tracks": [
            {
                "title": title,
                "rows": 1 + max(one.row for one in placed if one.track == track),
                "rowHeight": _CORE_ROW if track == 0 else _OTHER_ROW,
            }
            for track, title in enumerate(titles)
        ],
        "causes": _CAUSES,
        "texts": list(texts),
        "memory": [
            [round(seconds * 1e9), round(axis.place(seconds) * 1e9), amount]
            for seconds, amount in memory
        ],
        "spans": rows,
    }


def lay_out(spans: Sequence[TrackSpan]) -> tuple[list[str], list[Placed]]:
    """Return the titles of the tracks, and every span with its row."""
    titles: list[str] = []
    placed: list[Placed] = []
    rows_before = 0
    for lane in split_into_lanes(spans):
        title = track_title(lane.track)
        if not titles or titles[-1] != title:
            titles.append(title)
            rows_before = 0
        depths = _depths(lane)
        placed += [
            Placed(len(titles) - 1, rows_before + depth, span)
            for depth, (_, _, span) in zip(depths, lane.spans, strict=True)
        ]
        rows_before += 1 + max(depths, default=0)
    return titles, placed


def _depths(lane: Lane) -> list[int]:
    """Return how many spans of the lane enclose each span."""
    if lane.track not in NESTING_TRACKS:
        return [0] * len(lane.spans)
    ends: list[int] = []
    depths: list[int] = []
    for start, end, _ in lane.spans:
        while ends and ends[-1] <= start:
            ends.pop()
        depths.append(len(ends))
        ends.append(end)
    return depths


def _intro(loops: Sequence[Loop], count: int) -> str:
    words = f"What one device does in one step: {count:,} ops and transfers."
    longest = max(loops, key=lambda loop: loop.span.duration_s, default=None)
    if longest is not None and longest.iterations > 1:
        words += (
            f" A loop is drawn once with the number of its iterations: {longest.span.name} runs "
            f"{longest.iterations} times, {seconds_text(longest.iteration_s)} each."
        )
    return words


def _controls() -> Markup:
    buttons = [
        tag("button", label, type="button", data_do=action, title=title)
        for label, action, title in (
            ("−", "out", "zoom out (−)"),
            ("+", "in", "zoom in (+)"),
            ("Whole step", "reset", "show the whole step (0)"),
        )
    ]
    fold = tag(
        "label",
        tag("input", type="checkbox", id="timeline-fold", checked=True),
        " each loop once (off: true scale)",
    )
    hint = tag(
        "span",
        "drag to move, wheel to zoom once clicked, double-click an op to fill the view",
        class_="hint",
    )
    return tag("div", buttons, fold, hint, class_="controls script-only")


def _picture(spans: Sequence[TrackSpan], axis: FoldedAxis) -> Markup:
    """Draw the step for readers without JavaScript, with each loop once."""
    _, placed = lay_out(spans)
    end = max(axis.place(span.start_s + span.duration_s) for span in spans) or 1.0
    tops: dict[tuple[int, int], int] = {}
    height = 0
    track = 0
    for key in sorted({(one.track, one.row) for one in placed}):
        if key[0] != track:
            track, height = key[0], height + _GAP
        tops[key] = height
        height += _CORE_ROW if key[0] == 0 else _OTHER_ROW
    drawn: list[tuple[float, Markup]] = []
    for one in placed:
        start = axis.place(one.span.start_s)
        length = axis.place(one.span.start_s + one.span.duration_s) - start
        words = f"{one.span.name}: {seconds_text(one.span.duration_s)} × {one.span.times}"
        drawn.append(
            (
                length,
                tag(
                    "rect",
                    tag("title", words),
                    x=coordinate(_UNITS * start / end),
                    y=tops[one.track, one.row],
                    width=coordinate(_UNITS * length / end),
                    height=(_CORE_ROW if one.track == 0 else _OTHER_ROW) - 1,
                    class_=f"c-{one.span.cause}",
                ),
            )
        )
    drawn.sort(key=lambda entry: -entry[0])
    return tag(
        "svg",
        [markup for _, markup in drawn[:_PICTURE_SPANS]],
        viewBox=f"0 0 {_UNITS} {height}",
        preserveAspectRatio="none",
        height=height,
        class_="picture",
        role="img",
        aria_label="timeline of one step, each loop once",
    )
