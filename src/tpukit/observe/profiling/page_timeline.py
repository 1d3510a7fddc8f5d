"""One step as rows of slices: the measured one, and the predicted one below it with like rows."""

from collections.abc import Sequence

from ...checker.report.html.headline import BOUND_BY
from ...checker.report.lanes import FoldedAxis, find_loops, split_into_lanes
from ...compiler.timeline import TrackSpan
from ...hardware.figure import seconds_text
from ...pages.charts import coordinate
from ...pages.markup import Markup, join, tag
from ...pages.parts import PageSection, absent, badge, legend, section
from .steps import MeasuredStep, PredictedStep

SLICES_DRAWN = 600
_UNITS, _HEIGHT = 1000, 20
_CAUSES = {**BOUND_BY, "loop": "a loop"}


def timeline_section(measured: MeasuredStep | None, predicted: PredictedStep | None) -> PageSection:
    """The steps, each on its own scale, and what the colors mean."""
    drawn: list[Markup] = []
    spans: list[TrackSpan] = []
    for title, origin, step in (
        ("Measured", "measured", measured),
        ("Predicted", "model", predicted),
    ):
        if step is None or not step.spans:
            continue
        words = f"{title}: one step of one device, {step.where}. "
        drawn += [tag("h3", words, badge(origin)), _lanes(step.spans, title.lower())]
        spans += step.spans
    if not drawn:
        return section("Timeline", absent("No step could be cut out of this recording."))
    causes = {span.cause for span in spans}
    kinds = {f"c-{cause}": words for cause, words in _CAUSES.items() if cause in causes}
    intro = "The same rows for both; each step fills the width, whatever its length."
    return section("Timeline", drawn, legend(kinds), intro=intro)


def _lanes(spans: Sequence[TrackSpan], title: str) -> Markup:
    axis = FoldedAxis.of(find_loops(spans))
    whole = max(axis.place(span.start_s + span.duration_s) for span in spans) or 1.0
    rows: list[Markup] = []
    for lane in split_into_lanes(spans):
        inside = [span for _, _, span in lane.spans]
        # The enclosing one first, so that what it encloses is drawn over it.
        kept = sorted(inside, key=lambda span: -span.duration_s)[:SLICES_DRAWN]
        drawing = tag(
            "svg",
            [_slice(span, axis, whole) for span in kept],
            viewBox=f"0 0 {_UNITS} {_HEIGHT}",
            preserveAspectRatio="none",
            class_="lane",
            role="img",
            aria_label=f"{title}, {lane.title}: {len(inside):,} slices",
        )
        left_out = f" (the {len(kept):,} longest)" if len(kept) < len(inside) else ""
        rows.append(join(tag("div", lane.title + left_out, class_="lane-title"), drawing))
    return tag("div", rows, class_="lanes")


def _slice(span: TrackSpan, axis: FoldedAxis, whole: float) -> Markup:
    start = axis.place(span.start_s)
    length = axis.place(span.start_s + span.duration_s) - start
    times = f" × {span.times}" if span.times > 1 else ""
    words = f"{span.name}: {seconds_text(span.duration_s)}{times}, {_CAUSES.get(span.cause, '')}"
    return tag(
        "rect",
        tag("title", f"{words}. {span.op_name}" if span.op_name else words),
        x=coordinate(_UNITS * start / whole),
        width=coordinate(max(_UNITS * length / whole, 0.4)),
        height=_HEIGHT,
        class_=f"c-{span.cause}",
    )
