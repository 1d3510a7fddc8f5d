"""The sections of a profile's page, each from one part of the profile."""

from collections.abc import Sequence

from ...checker.report.html.time import BOUND_BY
from ...checker.report.lanes import FoldedAxis, find_loops, split_into_lanes
from ...compiler.timeline import TrackSpan
from ...hardware.figure import bytes_text, flops_text, seconds_text
from ...pages.charts import coordinate
from ...pages.markup import Child, Markup, join, tag
from ...pages.parts import (
    Column,
    PageSection,
    absent,
    badge,
    bullets,
    code,
    colored,
    definitions,
    legend,
    long_table,
    section,
    table,
)
from .analysis import BottleneckAnalysis, OpShare
from .comparison import StepComparison
from .findings import ProfileFinding
from .judging import COMMUNICATION, COMPUTE, INPUT, MEMORY, OVERHEAD
from .profile import Profile
from .steps import MeasuredStep, PredictedStep
from .xprof import XprofFigures

# The same colors as those of a predicted step's causes.
COLORS = {
    COMPUTE: "c-matrix",
    MEMORY: "c-hbm",
    COMMUNICATION: "c-ici",
    INPUT: "c-host",
    OVERHEAD: "c-overhead",
}


def ops_section(analysis: BottleneckAnalysis) -> PageSection:
    """Return the section with the heaviest ops, what bounds each, and its source."""
    total = analysis.duration_s * analysis.devices
    rows: list[Sequence[Child]] = [
        (
            _op_cell(op),
            colored(COLORS[op.kind], op.kind),
            op.by,
            seconds_text(op.seconds),
            f"{op.seconds / total:.1%}",
            f"{op.times:,}",
            flops_text(op.flops) if op.flops else "–",
            bytes_text(op.moved_bytes) if op.moved_bytes else "–",
        )
        for op in analysis.ops
    ]
    if not rows:
        return section("Heaviest ops", absent("The recording contains no op."))
    columns = (
        Column("op"),
        Column("bound by"),
        Column("told by"),
        Column("seconds", is_number=True, origin=analysis.origin),
        Column("share", is_number=True),
        Column("runs", is_number=True),
        Column("FLOPs each", is_number=True, origin="compiler"),
        Column("bytes each", is_number=True, origin="compiler"),
    )
    caption = "Heaviest ops, all their runs on all devices together"
    return section("Heaviest ops", long_table(columns, rows, caption=caption, rest="more, shorter"))


def _op_cell(op: OpShare) -> Markup:
    *folders, last = op.op_name.split("/")
    path = join([(folder, "/", tag("wbr")) for folder in folders], last)
    return tag(
        "div",
        code(op.name),
        tag("div", path, class_="path") if op.op_name else "",
        tag("div", op.source, class_="source") if op.source else "",
        class_="op",
    )


def findings_section(analysis: BottleneckAnalysis) -> PageSection:
    """Return the section with copies, unfused ops and waits, each with its source line."""
    findings = analysis.findings
    return section(
        "By source line",
        _found(findings.transfers, "Copies between host and device", "No copy was recorded."),
        _found(findings.unfused, "Ops that run unfused", "Every op that could be fused was."),
        _found(findings.waits, "What ran while the first device waited", "It never waited."),
    )


def _found(findings: Sequence[ProfileFinding], caption: str, nothing: str) -> Markup:
    if not findings:
        return join(tag("h3", caption), absent(nothing))
    rows: list[Sequence[Child]] = [
        (finding.what, code(finding.where), seconds_text(finding.seconds), f"{finding.times:,}")
        for finding in findings
    ]
    columns = (
        Column("what"),
        Column("where"),
        Column("seconds", is_number=True, origin="measured"),
        Column("times", is_number=True),
    )
    return long_table(columns, rows, caption=caption, rest="more, shorter")


def comparison_section(comparison: StepComparison) -> PageSection:
    """Return the section with the predicted step beside the measured one, op by op."""
    same = comparison.is_same_hardware
    rows: list[Sequence[Child]] = [
        (
            code(op.name),
            seconds_text(op.predicted_s) if same else "–",
            seconds_text(op.measured_s) if same else "–",
            f"{op.predicted_share:.1%}",
            f"{op.measured_share:.1%}",
        )
        for op in comparison.ops
    ]
    columns = (
        Column("op"),
        Column("predicted", is_number=True, origin="model"),
        Column("measured", is_number=True, origin="measured"),
        Column("of predicted", is_number=True),
        Column("of measured", is_number=True),
    )
    left = [
        f"{len(ops)} ops only {side}: {seconds_text(sum(op.seconds for op in ops))}."
        for side, ops in (
            ("predicted", comparison.only_predicted),
            ("measured", comparison.only_measured),
        )
        if ops
    ]
    why = "" if same else " Seconds of different devices are not compared, only shares."
    return section(
        "Predicted and measured",
        long_table(columns, rows, caption="Op by op, the largest difference first", rest="more")
        if rows
        else absent("No op has a partner on the other side."),
        bullets(left) if left else "",
        intro=comparison.header + "." + why,
    )


def memory_section(profile: Profile) -> PageSection:
    """Return the section with each device's memory before and after the block."""
    memory = profile.memory
    if memory is None:
        return section("Memory", absent("Memory was not recorded: capture_memory was off."))
    reasons = {device.reason for device in memory.after if device.reason}
    if reasons:
        return section("Memory", absent(f"Not known: {'; '.join(sorted(reasons))}."))
    before = {device.device: device for device in memory.before}
    rows: list[Sequence[Child]] = [
        (
            device.device,
            _amount(before.get(device.device, device).in_use_bytes),
            _amount(device.in_use_bytes),
            _amount(device.peak_bytes),
            _amount(device.limit_bytes),
        )
        for device in memory.after
    ]
    columns = (
        Column("device"),
        *(
            Column(title, is_number=True, origin="measured")
            for title in ("before", "after", "peak of the process", "limit")
        ),
    )
    return section("Memory", table(columns, rows, caption="Memory of each device"))


def _amount(value: int | None) -> str:
    return bytes_text(value) if value is not None else "–"


def xprof_section(figures: XprofFigures) -> PageSection:
    """Return the section with XProf's figures, or why there are none."""
    if figures.reason:
        return section("XProf", absent(f"XProf has no figures: {figures.reason}."))
    entries = definitions((name, value) for name, value in figures.figures.items())
    return section("XProf", entries, intro="Figures by XProf's converters, of the same file.")


SLICES_DRAWN = 600
_UNITS, _HEIGHT = 1000, 20
_CAUSES = {**BOUND_BY, "loop": "a loop"}


def timeline_section(measured: MeasuredStep | None, predicted: PredictedStep | None) -> PageSection:
    """Return the section with the steps, each on its own scale, and a legend."""
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
        return section("Timeline", absent("No step was found in this recording."))
    causes = {span.cause for span in spans}
    kinds = {f"c-{cause}": words for cause, words in _CAUSES.items() if cause in causes}
    intro = "The same rows for both; each step fills the width, whatever its length."
    return section("Timeline", drawn, legend(kinds), intro=intro)


def _lanes(spans: Sequence[TrackSpan], title: str) -> Markup:
    axis = FoldedAxis.of(find_loops(spans))
    length = max(axis.place(span.start_s + span.duration_s) for span in spans) or 1.0
    rows: list[Markup] = []
    for lane in split_into_lanes(spans):
        inside = [span for _, _, span in lane.spans]
        # The longest first, so that enclosed slices are drawn over it.
        kept = sorted(inside, key=lambda span: -span.duration_s)[:SLICES_DRAWN]
        drawing = tag(
            "svg",
            [_slice(span, axis, length) for span in kept],
            viewBox=f"0 0 {_UNITS} {_HEIGHT}",
            preserveAspectRatio="none",
            class_="lane",
            role="img",
            aria_label=f"{title}, {lane.title}: {len(inside):,} slices",
        )
        left_out = f" (the {len(kept):,} longest)" if len(kept) < len(inside) else ""
        rows.append(join(tag("div", lane.title + left_out, class_="lane-title"), drawing))
    return tag("div", rows, class_="lanes")


def _slice(span: TrackSpan, axis: FoldedAxis, total: float) -> Markup:
    start = axis.place(span.start_s)
    length = axis.place(span.start_s + span.duration_s) - start
    times = f" × {span.times}" if span.times > 1 else ""
    words = f"{span.name}: {seconds_text(span.duration_s)}{times}, {_CAUSES.get(span.cause, '')}"
    return tag(
        "rect",
        tag("title", f"{words}. {span.op_name}" if span.op_name else words),
        x=coordinate(_UNITS * start / total),
        width=coordinate(max(_UNITS * length / total, 0.4)),
        height=_HEIGHT,
        class_=f"c-{span.cause}",
    )
