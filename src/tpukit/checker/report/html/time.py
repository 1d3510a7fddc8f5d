"""The page's sections on time: causes, heaviest ops, collectives, roofline."""

from collections.abc import Sequence
from math import ceil, floor, log10, sqrt

from ....compiler.memory.reading import short_op_name
from ....compiler.timeline import TrackSpan
from ....hardware.figure import bytes_text, flops_text, seconds_text
from ....pages.charts import BarMark, BarPiece, coordinate, stacked_bar
from ....pages.markup import Child, Markup, join, tag
from ....pages.parts import (
    Column,
    PageSection,
    absent,
    badge,
    code,
    colored,
    long_table,
    section,
    table,
    warning,
)
from ..schema import Report

BOUND_BY = {
    "matrix": "the matrix unit",
    "hbm": "HBM bandwidth",
    "vector": "VMEM and the vector unit",
    "kernel": "Pallas kernels",
    "ici": "the links between chips",
    "dcn": "the network between slices",
    "host": "host memory",
    "overhead": "starting ops",
}
_SHOWN_SHARE = 0.0005
_MEANING = {
    "matrix": "products at the rate of the matrix unit",
    "hbm": "reading and writing HBM",
    "vector": "elementwise work in VMEM",
    "kernel": "inside Pallas kernels",
    "ici": "waiting for other chips of the slice, nothing to hide it behind",
    "dcn": "waiting for other slices, nothing to hide it behind",
    "host": "waiting for the host's memory",
    "overhead": "starting ops",
}


def time_section(report: Report) -> PageSection:
    """Return the section with time by cause and the heaviest ops."""
    prediction = report.get("prediction")
    if not prediction:
        why = report.get("no_prediction") or "the check stopped at the verdict on memory"
        return section(
            "Time", absent(f"No step time, timeline, roofline or table of collectives: {why}.")
        )
    step = prediction["step_time_s"]
    seconds: dict[str, float] = prediction["seconds_by_cause"]
    pieces = [
        BarPiece(f"c-{cause}", amount, f"{BOUND_BY.get(cause, cause)}: {seconds_text(amount)}")
        for cause, amount in seconds.items()
        if amount > 0
    ]
    marks = [BarMark(0.0, "0"), BarMark(step, seconds_text(step))]
    label = f"a step of {seconds_text(step)} by cause"
    return section(
        "Time",
        stacked_bar(pieces, whole=step, label=label, marks=marks),
        _causes(seconds, step),
        [warning("Not in the model: ", caveat) for caveat in prediction["caveats"]],
        _top_ops(report),
        intro=join("One step on one device, by what the core waits for. ", badge("model")),
    )


def _causes(seconds: dict[str, float], step: float) -> Markup:
    rows: list[Sequence[Child]] = [
        (
            colored(f"c-{cause}", BOUND_BY.get(cause, cause)),
            seconds_text(amount),
            f"{amount / step:.1%}",
            _MEANING.get(cause, ""),
        )
        for cause, amount in sorted(seconds.items(), key=lambda item: -item[1])
        if step and amount / step >= _SHOWN_SHARE
    ]
    columns = (
        Column("bound by"),
        Column("seconds", is_number=True, origin="model"),
        Column("share", is_number=True),
        Column("what it is"),
    )
    return table(columns, rows, caption="Time by cause")


def _top_ops(report: Report) -> Markup:
    prediction = report.get("prediction") or {}
    step = prediction["step_time_s"]
    rows: list[Sequence[Child]] = [
        (
            op_cell(op["name"], short_op_name(op["op_name"])),
            colored(f"c-{op['cause']}", BOUND_BY.get(op["cause"]) or op["cause"]),
            seconds_text(op["seconds"]),
            f"{op['seconds'] / step:.1%}" if step else "",
            f"{op['times']:,}",
            flops_text(op["flops"]) if op["flops"] else "–",
            bytes_text(op["bytes"]) if op["bytes"] else "–",
        )
        for op in prediction.get("top_ops") or ()
    ]
    if not rows:
        return absent("The program has no op that takes time.")
    columns = (
        Column("op"),
        Column("bound by"),
        Column("seconds", is_number=True, origin="model"),
        Column("share", is_number=True),
        Column("times", is_number=True),
        Column("FLOPs", is_number=True, origin="compiler"),
        Column("HBM bytes", is_number=True, origin="compiler"),
    )
    return table(columns, rows, caption="Heaviest ops, all their runs in a step together")


def communication_section(report: Report) -> PageSection:
    """Return the section with the collectives, those with the longest wait first."""
    rows = report.get("collectives")
    if rows is None:
        return section("Communication", absent("This report was kept without its collectives."))
    if not rows:
        return section("Communication", absent("The program has no collectives."))
    step = (report.get("prediction") or {}).get("step_time_s") or 0.0
    cells: list[Sequence[Child]] = [
        (
            tag("span", row["kind"], class_="nowrap"),
            f"{row['group_size']:,}",
            bytes_text(row["bytes"]),
            f"{row['times']:,}",
            seconds_text(row["seconds"]),
            seconds_text(row["exposed_s"]),
            f"{row['exposed_s'] / step:.1%}" if step else "",
            op_cell("", short_op_name(row["op_name"])),
        )
        for row in rows
    ]
    columns = (
        Column("kind"),
        Column("devices", is_number=True, origin="compiler"),
        Column("bytes each", is_number=True, origin="compiler"),
        Column("times", is_number=True, origin="compiler"),
        Column("seconds", is_number=True, origin="model"),
        Column("exposed", is_number=True, origin="model"),
        Column("of step", is_number=True),
        Column("largest from"),
    )
    waited = sum(row["exposed_s"] for row in rows)
    whole = sum(row["seconds"] for row in rows)
    words = (
        f"{seconds_text(whole)} of transfers in a step; the core waits {seconds_text(waited)} for "
        "them, their start and their turn on a link included, and works beside the rest. "
    )
    return section(
        "Communication",
        long_table(
            columns,
            cells,
            caption="Collectives, the most waited for first",
            rest="more, less waited for",
        ),
        intro=join(words, badge("model")),
    )


def op_cell(name: str, where: str, source: str | None = None) -> Markup:
    """Return a table cell with op name, path and source; unknown parts are left out."""
    # A path breaks only after its slashes.
    *folders, last = where.split("/")
    path = join([(folder, "/", tag("wbr")) for folder in folders], last)
    return tag(
        "div",
        code(name) if name else "",
        tag("div", path, class_="path") if where else "",
        tag("div", source, class_="source") if source else "",
        class_="op",
    )


OPS_DRAWN = 200
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 400, 70, 34, 34, 52
_WAITS = ("loop", "ici", "dcn", "host")


def roofline_section(report: Report, spans: Sequence[TrackSpan]) -> PageSection:
    """Return the section that draws ops as dots under the chip's two roofs."""
    chip = report.get("chip")
    ops = [span for span in spans if span.track == "core" and span.cause not in _WAITS]
    drawable = [op for op in ops if op.flops > 0 and op.bytes > 0 and op.duration_s > 0]
    drawable.sort(key=lambda op: -op.duration_s * op.times)
    if not drawable or chip is None:
        reason = "This report was kept without its timeline or the chip's figures."
        if spans:
            reason = "No op of this program both computes products and touches HBM."
        return section("Roofline", absent(reason))
    peak, rate = chip["peak_bf16_tflops"].get("value"), chip["hbm_gbps"].get("value")
    if not peak or not rate:
        missing = chip["hbm_gbps" if peak else "peak_bf16_tflops"].get("reason", "")
        return section("Roofline", absent(f"The chip's roofs are not known: {missing}"))
    shown = drawable[:OPS_DRAWN]
    total = sum(op.duration_s * op.times for op in ops)
    covered = sum(op.duration_s * op.times for op in shown) / total if total else 0.0
    words = (
        f"{len(shown)} ops with products, {covered:.0%} of the core's working time; "
        f"the size of a dot is its time. {len(ops) - len(drawable):,} ops without products or "
        "without HBM traffic have no place here. "
    )
    roofs = (
        f"Roofs of one {chip['name']} device: {peak:,.0f} bf16 TFLOP/s and {rate:,.0f} GB/s "
        f"of HBM, which meet at {peak * 1e3 / rate:,.0f} FLOP/byte. "
    )
    return section(
        "Roofline",
        tag(
            "figure",
            tag("div", _chart(shown, peak * 1e12, rate * 1e9), class_="scroll"),
            tag("figcaption", words, badge("model"), " ", roofs, badge("datasheet")),
        ),
        intro="Left of the corner an op waits for HBM, right of it for the matrix unit.",
    )


def _chart(ops: Sequence[TrackSpan], peak: float, rate: float) -> Markup:
    corner = peak / rate
    intensities = [op.flops / op.bytes for op in ops]
    speeds = [op.flops / op.duration_s for op in ops]
    # An outlier would squeeze all other ops, so it is drawn at the edge.
    left, right = _decades([*intensities, corner / 10, corner * 10], within=(-2, 5))
    bottom, top = _decades([*speeds, peak], within=(8, 17))

    def across(intensity: float) -> float:
        share = (log10(intensity) - left) / (right - left)
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(1.0, max(0.0, share))

    def up(speed: float) -> float:
        share = (log10(speed) - bottom) / (top - bottom)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * min(1.0, max(0.0, share))

    drawn: list[Markup] = []
    for power in range(left, right + 1):
        x = coordinate(across(10.0**power))
        drawn.append(tag("line", x1=x, x2=x, y1=_TOP, y2=_HEIGHT - _BOTTOM, class_="grid"))
        drawn.append(tag("text", f"{10.0**power:,g}", x=x, y=_HEIGHT - 32, text_anchor="middle"))
    for power in range(bottom, top + 1):
        y = up(10.0**power)
        drawn.append(
            tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=coordinate(y), y2=coordinate(y),
                class_="grid")
        )  # fmt: skip
        drawn.append(
            tag("text", f"{10.0 ** (power - 12):,g}", x=_LEFT - 8, y=coordinate(y + 4),
                text_anchor="end")
        )  # fmt: skip
    middle = coordinate((_LEFT + _WIDTH) / 2)
    drawn.append(
        tag("text", "FLOP per byte of HBM", x=middle, y=_HEIGHT - 10, text_anchor="middle")
    )
    drawn.append(tag("text", "TFLOP/s", x=6, y=_TOP - 16))
    start = max(10.0**left, 10.0**bottom / rate)
    roof = [(start, start * rate), (corner, peak), (10.0**right, peak)]
    points = " ".join(f"{coordinate(across(x))},{coordinate(up(y))}" for x, y in roof)
    longest = max(op.duration_s * op.times for op in ops)
    for op, intensity, speed in zip(ops, intensities, speeds, strict=True):
        share = op.duration_s * op.times / longest
        drawn.append(
            tag(
                "circle",
                tag("title", _words(op, intensity, speed)),
                cx=coordinate(across(intensity)),
                cy=coordinate(up(speed)),
                r=coordinate(3 + 9 * sqrt(share)),
                class_=f"dot c-{op.cause}",
            )
        )
    drawn.append(tag("polyline", points=points, class_="roof"))
    return tag(
        "svg", drawn, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", class_="chart", role="img",
        aria_label="roofline of the heaviest ops",
    )  # fmt: skip


def _decades(values: Sequence[float], *, within: tuple[int, int]) -> tuple[int, int]:
    least, most = floor(log10(min(values))), ceil(log10(max(values)))
    low, high = within
    return min(max(least, low), high - 1), max(min(most, high), low + 1)


def _words(op: TrackSpan, intensity: float, speed: float) -> str:
    return (
        f"{op.name}: {intensity:,.3g} FLOP/byte, {speed / 1e12:,.4g} TFLOP/s, "
        f"{seconds_text(op.duration_s * op.times)} in a step. {short_op_name(op.op_name)}"
    )
