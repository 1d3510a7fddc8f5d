"""Where the step's time goes: the split by cause, the heaviest ops, the collectives."""

from collections.abc import Sequence

from ....compiler.memory.reading import short_op_name
from ....hardware.figure import bytes_text, flops_text, seconds_text
from ....pages.charts import BarMark, BarPiece, stacked_bar
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
from .headline import BOUND_BY

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
    """The split and the ops."""
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
    """Collectives, those the core waits for first."""
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
    """Make the cell; parts that are not known are left out."""
    # A path may break behind its slashes rather than anywhere.
    *folders, last = where.split("/")
    path = join([(folder, "/", tag("wbr")) for folder in folders], last)
    return tag(
        "div",
        code(name) if name else "",
        tag("div", path, class_="path") if where else "",
        tag("div", source, class_="source") if source else "",
        class_="op",
    )
