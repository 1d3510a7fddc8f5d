"""The roofline: how near each op comes to what the chip can do for its intensity."""

from collections.abc import Sequence
from math import ceil, floor, log10, sqrt

from ....compiler.memory.reading import short_op_name
from ....compiler.timeline import TrackSpan
from ....hardware.figure import seconds_text
from ....pages.charts import coordinate
from ....pages.markup import Markup, tag
from ....pages.parts import PageSection, absent, badge, section
from ..schema import Report

OPS_DRAWN = 200
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 400, 70, 34, 34, 52
_WAITS = ("loop", "ici", "dcn", "host")


def roofline_section(report: Report, spans: Sequence[TrackSpan]) -> PageSection:
    """Ops as dots under the chip's two roofs."""
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
    # An op far off to one side would squeeze all others; it is drawn at the edge instead.
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
