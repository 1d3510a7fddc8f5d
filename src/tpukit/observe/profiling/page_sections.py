"""The sections of a profile's page that show what was found, each from one part of it."""

from collections.abc import Sequence

from ...hardware.figure import bytes_text, flops_text, seconds_text
from ...pages.markup import Child, Markup, join, tag
from ...pages.parts import (
    Column,
    PageSection,
    absent,
    bullets,
    code,
    colored,
    definitions,
    long_table,
    section,
    table,
)
from .analysis import BottleneckAnalysis, OpShare
from .comparison import StepComparison
from .findings import ProfileFinding
from .judging import COMMUNICATION, COMPUTE, INPUT, MEMORY, OVERHEAD
from .profile import Profile
from .xprof_figures import XprofFigures

# Colors of a step's causes stand for the same thing here.
COLORS = {
    COMPUTE: "c-matrix",
    MEMORY: "c-hbm",
    COMMUNICATION: "c-ici",
    INPUT: "c-host",
    OVERHEAD: "c-overhead",
}


def ops_section(analysis: BottleneckAnalysis) -> PageSection:
    """The heaviest ops with what bounds each and where it comes from."""
    whole = analysis.duration_s * analysis.devices
    rows: list[Sequence[Child]] = [
        (
            _op_cell(op),
            colored(COLORS[op.kind], op.kind),
            op.by,
            seconds_text(op.seconds),
            f"{op.seconds / whole:.1%}",
            f"{op.times:,}",
            flops_text(op.flops) if op.flops else "–",
            bytes_text(op.moved_bytes) if op.moved_bytes else "–",
        )
        for op in analysis.ops
    ]
    if not rows:
        return section("Heaviest ops", absent("The recording holds no op."))
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
    """Copies, unfused ops and waits, each with its line."""
    found = analysis.findings
    return section(
        "By source line",
        _found(found.transfers, "Copies between host and device", "No copy was recorded."),
        _found(found.unfused, "Ops that run unfused", "Every op that could be fused was."),
        _found(found.waits, "What ran while the first device waited", "It never waited."),
    )


def _found(findings: Sequence[ProfileFinding], caption: str, nothing: str) -> Markup:
    if not findings:
        return join(tag("h3", caption), absent(nothing))
    rows: list[Sequence[Child]] = [
        (one.what, code(one.where), seconds_text(one.seconds), f"{one.times:,}") for one in findings
    ]
    columns = (
        Column("what"),
        Column("where"),
        Column("seconds", is_number=True, origin="measured"),
        Column("times", is_number=True),
    )
    return long_table(columns, rows, caption=caption, rest="more, shorter")


def comparison_section(comparison: StepComparison) -> PageSection:
    """The predicted step beside the measured one, op by op."""
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
    """The memory of each device before and after the block."""
    memory = profile.memory
    if memory is None:
        return section("Memory", absent("Memory was not recorded: capture_memory was off."))
    reasons = {one.reason for one in memory.after if one.reason}
    if reasons:
        return section("Memory", absent(f"Not known: {'; '.join(sorted(reasons))}."))
    before = {one.device: one for one in memory.before}
    rows: list[Sequence[Child]] = [
        (
            one.device,
            _amount(before.get(one.device, one).in_use_bytes),
            _amount(one.in_use_bytes),
            _amount(one.peak_bytes),
            _amount(one.limit_bytes),
        )
        for one in memory.after
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
    """XProf's own figures, or why there are none."""
    if figures.reason:
        return section("XProf", absent(f"No figures of XProf's own: {figures.reason}."))
    entries = definitions((name, value) for name, value in figures.figures.items())
    return section("XProf", entries, intro="What XProf's converters make of the same file.")
