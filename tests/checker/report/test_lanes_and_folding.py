"""Rows on which nothing crosses, and an axis that shows each loop once."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.checker.report.lanes import (
    NESTING_TRACKS,
    FoldedAxis,
    find_loops,
    later_turns,
    split_into_lanes,
)
from tpukit.compiler.timeline import TrackSpan

SPAN = st.builds(
    TrackSpan,
    track=st.sampled_from(["core", "hbm", "ici", "dcn", "host", "ici x"]),
    name=st.text(max_size=3),
    start_s=st.floats(0, 1, allow_nan=False),
    duration_s=st.floats(0, 1, allow_nan=False),
    cause=st.sampled_from(["matrix", "hbm", "loop"]),
    times=st.integers(1, 8),
)


@given(st.lists(SPAN, max_size=40))
@settings(deadline=None)
def test_on_a_row_spans_follow_or_enclose_each_other(spans):
    lanes = split_into_lanes(spans)
    assert sorted(map(repr, spans)) == sorted(
        repr(span) for lane in lanes for _, _, span in lane.spans
    )
    assert len({lane.title for lane in lanes}) == len(lanes)
    for lane in lanes:
        for place, (start, end, _) in enumerate(lane.spans):
            for other_start, other_end, _ in lane.spans[place + 1 :]:
                assert other_start >= start
                apart = other_start >= end
                inside = other_end <= end and lane.track in NESTING_TRACKS
                assert apart or inside


def test_copies_side_by_side_get_rows_of_their_own(step):
    lanes = split_into_lanes(step.spans)
    assert [(lane.title, len(lane.spans)) for lane in lanes] == [
        ("Core (MXU and VPU)", 5),
        ("HBM DMA", 1),
        ("HBM DMA #2", 1),
        ("ICI", 1),
    ]


def test_tracks_are_in_reading_order_whatever_axes_there_are():
    tracks = ("other", "dcn", "ici y", "host", "core", "ici x")
    lanes = split_into_lanes([TrackSpan(track, "a", 0.0, 1.0, "hbm") for track in tracks])
    titles = [lane.title for lane in lanes]
    assert titles == ["Core (MXU and VPU)", "ICI x", "ICI y", "DCN", "Host link", "other"]


def test_turns_follow_from_how_often_the_body_runs(step):
    (loop,) = find_loops(step.spans)
    assert (loop.span.name, loop.iterations) == ("while.1", 4)
    assert loop.iteration_s == pytest.approx(0.020)


def test_a_loop_in_a_loop_turns_by_its_own_count():
    spans = [
        TrackSpan("core", "outer", 0.0, 1.0, "loop", times=1),
        TrackSpan("core", "before", 0.0, 0.1, "hbm", times=2),
        TrackSpan("core", "inner", 0.1, 0.4, "loop", times=2),
        TrackSpan("core", "body", 0.1, 0.1, "matrix", times=8),
        TrackSpan("core", "after", 1.0, 0.5, "hbm", times=1),
    ]
    outer, inner = find_loops(spans)
    assert (outer.iterations, inner.iterations) == (2, 4)
    axis = FoldedAxis.of([outer, inner])
    # 0.1 before + 0.1 body once, then what follows the outer loop.
    assert axis.place(1.0) == pytest.approx(0.2)
    assert axis.place(1.5) == pytest.approx(0.7)
    assert axis.place(0.15) == pytest.approx(0.15)


@given(st.lists(SPAN, max_size=20), st.lists(st.floats(0, 2, allow_nan=False), max_size=20))
@settings(deadline=None)
def test_a_folded_axis_never_runs_backwards_or_faster(spans, moments):
    axis = FoldedAxis.of(find_loops(spans))
    moments.sort()
    for earlier, later in pairwise(moments):
        grown = axis.place(later) - axis.place(earlier)
        assert -1e-9 <= grown <= later - earlier + 1e-9


def test_what_a_loop_leaves_empty_is_named(step):
    (rest,) = later_turns(find_loops(step.spans))
    assert rest.name == "3 more iterations of while.1"
    assert rest.start_s == pytest.approx(0.030, abs=2e-9)
    assert rest.start_s + rest.duration_s == pytest.approx(0.090)
    # It fits on the core's one row, beside the first turn.
    assert [
        lane.number for lane in split_into_lanes([*step.spans, rest]) if lane.track == "core"
    ] == [0]
