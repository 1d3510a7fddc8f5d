"""The page's section on memory: bar by purpose, curve over the schedule, largest buffers."""

from collections.abc import Sequence
from typing import Any

from ....compiler.memory.attribution import CATEGORIES
from ....compiler.memory.view import host_memory_text, readable_path
from ....hardware.figure import bytes_text
from ....pages.charts import BarMark, BarPiece, coordinate, stacked_bar
from ....pages.markup import Child, Markup, join, slug, tag
from ....pages.parts import (
    Column,
    PageSection,
    absent,
    badge,
    colored,
    long_table,
    section,
    table,
    warning,
)
from ....plain_data import JsonObject
from ...host_memory import USES
from ..schema import Report
from .time import op_cell

_APART = 0.15  # of the bar: two marks nearer than this would be written over each other
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 900, 260, 72, 18, 34


def memory_section(report: Report) -> PageSection:
    """Return the section on memory."""
    memory = report.get("memory")
    if not memory:
        return section("Memory", absent("This report holds no memory report."))
    return section(
        "Memory",
        _bar(memory),
        _purposes(memory),
        _findings(memory),
        _curve(memory),
        _buffers(memory),
        _hosts(report.get("host_memory")),
        intro=join("HBM of one device at its fullest moment. ", badge(memory["origin"])),
    )


def _bar(memory: JsonObject) -> Markup:
    total, usable = memory["total_bytes"], memory.get("usable_bytes")
    pieces = [
        BarPiece(_kind(name), float(amount), f"{name}: {bytes_text(amount)}")
        for name, amount in memory["purposes"].items()
    ]
    label = f"{bytes_text(total)} of HBM"
    marks = [BarMark(0.0, "0")]
    if usable:
        label += f" of {bytes_text(usable)} usable"
        marks.append(BarMark(usable, f"limit {bytes_text(usable)}", is_limit=True))
    if not usable or abs(total - usable) > _APART * max(total, usable):
        marks.append(BarMark(total, bytes_text(total)))
    return stacked_bar(pieces, whole=max(total, usable or 0), label=label, marks=marks)


def _purposes(memory: JsonObject) -> Markup:
    total = memory["total_bytes"]
    rows: list[Sequence[Child]] = [
        (
            colored(_kind(name), name),
            bytes_text(amount),
            f"{amount / total:.1%}" if total else "",
            CATEGORIES.get(name, ""),
        )
        for name, amount in memory["purposes"].items()
    ]
    if memory.get("host_bytes"):
        what = host_memory_text(memory.get("host_computation_bytes", 0))
        rows.append(("host memory", bytes_text(memory["host_bytes"]), "", what))
    columns = (
        Column("purpose"),
        Column("bytes", is_number=True, origin="compiler"),
        Column("share", is_number=True),
        Column("what it is"),
    )
    return table(columns, rows, caption="HBM by purpose")


def _hosts(hosts: JsonObject | None) -> Markup:
    """Return the memory of a host by use."""
    if not hosts:
        return join()
    rows: list[Sequence[Child]] = [
        (name, "–", "–", figure.get("reason", ""))
        if figure["value"] is None
        else (name, bytes_text(figure["value"]), badge(figure["origin"]), USES.get(name, ""))
        for name, figure in hosts["uses"].items()
    ]
    columns = (
        Column("use"),
        Column("bytes", is_number=True),
        Column("origin"),
        Column("what it is"),
    )
    shown = table(columns, rows, caption="Memory of one host")
    sentence = f"{hosts['verdict']}."
    return join(shown, warning(sentence) if hosts["fits"] is False else tag("p", sentence))


def _findings(memory: JsonObject) -> list[Markup]:
    return [
        warning(
            tag("strong", finding["kind"]),
            f" {finding['what']}, {bytes_text(finding['size_bytes'])}: {finding['advice']} ",
            badge("compiler"),
        )
        for finding in memory.get("findings") or ()
    ]


def _curve(memory: JsonObject) -> Markup:
    curve, peak = memory.get("curve"), memory.get("peak")
    if not curve or not peak:
        return absent("The compiler listed no schedule, so there is no curve of live memory.")
    length = max(memory.get("schedule_length") or 1, curve[-1][0], 1)
    usable = memory.get("usable_bytes")
    top = max(usable or 0, *(amount for _, amount in curve)) * 1.06
    floor = _HEIGHT - _BOTTOM

    def place(position: float, amount: float) -> tuple[float, float]:
        across = _LEFT + (_WIDTH - _LEFT - 12) * position / length
        return across, floor - (floor - _TOP) * amount / top

    points = [place(*point) for point in curve]
    line = " ".join(f"{coordinate(x)},{coordinate(y)}" for x, y in points)
    area = f"{coordinate(points[0][0])},{floor} {line} {coordinate(points[-1][0])},{floor}"
    highest = max(curve, key=lambda point: point[1])
    at_x, at_y = place(*highest)
    drawn = [*_scale(top, place, length), tag("polygon", points=area, class_="area")]
    drawn.append(tag("polyline", points=line, class_="curve"))
    if usable:
        y = coordinate(place(0, usable)[1])
        drawn.append(tag("line", x1=_LEFT, x2=_WIDTH - 12, y1=y, y2=y, class_="limit-line"))
        drawn.append(
            tag("text", f"limit {bytes_text(usable)}", x=_WIDTH - 16, y=coordinate(float(y) - 6),
                class_="limit-text", text_anchor="end")
        )  # fmt: skip
    right = at_x > _WIDTH * 0.6
    drawn.append(tag("circle", cx=coordinate(at_x), cy=coordinate(at_y), r=5, class_="peak"))
    drawn.append(
        tag("text", "fullest", x=coordinate(at_x + (4 if right else -4)),
            y=coordinate(at_y - 11), class_="peak-text", text_anchor="end" if right else "start")
    )  # fmt: skip
    where = f" ({peak['source']})" if peak.get("source") else ""
    words = f"Live HBM over the schedule. Fullest at {peak['position']:,} of {length:,}: "
    return tag(
        "figure",
        tag(
            "div",
            tag("svg", drawn, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", class_="chart", role="img",
                aria_label="live HBM over the schedule"),
            class_="scroll",
        ),
        tag(
            "figcaption",
            words,
            tag("code", peak.get("op_name") or peak["instruction"]),
            where,
            " ",
            badge("compiler"),
        ),
    )  # fmt: skip


def _scale(top: float, place: Any, length: int) -> list[Markup]:
    """Draw grid lines at round amounts, and label the start and end of the schedule."""
    step = 2.0 ** max(0, int(top).bit_length() - 3)
    drawn: list[Markup] = []
    amount = 0.0
    while amount <= top:
        x, y = place(0, amount)
        drawn.append(
            tag("line", x1=_LEFT, x2=_WIDTH - 12, y1=coordinate(y), y2=coordinate(y), class_="grid")
        )
        drawn.append(
            tag("text", bytes_text(amount) if amount else "0", x=x - 8, y=coordinate(y + 4),
                text_anchor="end")
        )  # fmt: skip
        amount += step
    bottom = _HEIGHT - 10
    drawn.append(tag("text", "first instruction", x=_LEFT, y=bottom))
    drawn.append(tag("text", f"instruction {length:,}", x=_WIDTH - 12, y=bottom, text_anchor="end"))
    return drawn


def _buffers(memory: JsonObject) -> Markup:
    buffers = memory.get("buffers") or []
    if not buffers:
        return absent("The compiler listed no buffers.")
    columns = (
        Column("size", is_number=True, origin="compiler"),
        Column("purpose"),
        Column("shape and layout"),
        Column("padding", is_number=True, origin="compiler"),
        Column("at peak"),
        Column("from"),
    )
    rows = [_buffer_row(one) for one in buffers]
    return long_table(columns, rows, caption="Largest buffers", rest="smaller buffers")


def _buffer_row(one: JsonObject) -> Sequence[Child]:
    waste = one["padding_bytes"]
    shape = tag(
        "div", tag("code", one["shape"]), tag("div", one["layout"], class_="path"), class_="op"
    )
    purpose = one["purpose"] + (" (host)" if one["space"] == "host" else "")
    return (
        bytes_text(one["size_bytes"]),
        colored(_kind(one["purpose"]), purpose),
        shape,
        f"{waste / one['size_bytes']:.0%}" if waste and one["size_bytes"] else "–",
        "yes" if one["at_peak"] else "no",
        op_cell("", readable_path(one["name"]), one.get("source")),
    )


def _kind(purpose: str) -> str:
    return "p-" + slug(purpose)
