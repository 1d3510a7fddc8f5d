"""Compare two reports figure by figure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from ...hardware.figure import bytes_text, seconds_text
from ...plain_data import JsonMapping
from ...shown import Facts
from .schema import Report

Unit = Literal["", "B", "s", "share", "count"]
SECTIONS = (
    *("verdict", "program", "memory", "time", "operations", "communication", "options"),
    "versions",
)
# Two runs of one program agree exactly; a smaller difference is floating-point rounding.
_SAME = 1e-9
_MEMORY = ("total_bytes", "host_bytes", "argument_bytes", "temp_bytes", "usable_bytes")
_ELSEWHERE = ("options", "slice")  # of a job: the report has them itself
_TIMES: tuple[tuple[str, Unit], ...] = (
    ("step_time_s", "s"),
    ("tokens_per_s_per_chip", "count"),
    ("examples_per_s_per_chip", "count"),
    ("mfu", "share"),
)
_NAMES = {
    "total_bytes": "HBM per device",
    "host_bytes": "host memory",
    "argument_bytes": "arguments",
    "temp_bytes": "heap",
    "usable_bytes": "HBM the compiler may use",
    "step_time_s": "step",
    "tokens_per_s_per_chip": "tokens/s/chip",
    "examples_per_s_per_chip": "examples/s/chip",
    "mfu": "MFU",
}


@dataclass(frozen=True)
class Change(Facts):
    """One figure in two reports.

    Attributes:
        section: One of `SECTIONS`.
        before: Value in the first report; None if it has none.
        after: Value in the second report.
        origin: Origin of both numbers; "" if they are no numbers.
        is_part: Whether it is part of a sum in the same section.
    """

    section: str
    name: str
    before: Any
    after: Any
    unit: Unit = ""
    origin: str = ""
    is_part: bool = False
    _facts = "* delta percent"

    @property
    def delta(self) -> float | None:
        """Second value minus first; None if either is no number."""
        if not self.unit or self.before is None or self.after is None:
            return None
        return float(self.after) - float(self.before)

    @property
    def percent(self) -> float | None:
        """The difference in percent of the first value."""
        return 100 * self.delta / self.before if self.delta is not None and self.before else None

    @property
    def is_change(self) -> bool:
        """Whether the values differ."""
        return not _equal(self.before, self.after)

    @property
    def words(self) -> tuple[str, str, str]:
        """First value, second value and difference as text."""
        before, after = (_word(value, self.unit) for value in (self.before, self.after))
        if self.delta is None or not self.is_change:
            return before, after, ""
        sign = "+" if self.delta >= 0 else "−"
        if self.unit == "share":
            return before, after, f"{sign}{100 * abs(self.delta):.1f} points"
        difference = sign + _word(abs(self.delta), self.unit)
        if self.percent is not None:
            difference += f" ({sign}{abs(self.percent):.1f} %)"
        return before, after, difference


def compare_reports(a: Report, b: Report) -> list[Change]:
    """Return every figure of two reports in pairs, by section, including equal ones.

    Parts of a sum come last in their section, sorted by their difference.
    """
    return sorted(
        _pairs(a, b),
        key=lambda change: (
            SECTIONS.index(change.section),
            change.is_part,
            -abs(change.delta or 0) if change.is_part else 0,
        ),
    )


def _pairs(a: Report, b: Report) -> Iterator[Change]:
    yield Change("verdict", "verdict", a.get("verdict"), b.get("verdict"))
    yield Change("program", "program", a.get("program"), b.get("program"))
    yield Change("program", "slice", _slice(a), _slice(b))
    for name, before, after in _both(a.get("job"), b.get("job")):
        if name not in _ELSEWHERE:
            yield Change("program", name, before, after)
    yield from _memory(a.get("memory") or {}, b.get("memory") or {})
    yield from _time(a, b)
    yield from _programs(a.get("capture") or {}, b.get("capture") or {})
    if "operations" in a and "operations" in b:
        for name, before, after in _both(a["operations"], b["operations"]):
            yield Change("operations", name, before or 0, after or 0, "count", "compiler")
    yield from _communication(a, b)
    for name, before, after in _both(a.get("options"), b.get("options")):
        yield Change("options", name, before, after)
    for name, before, after in _both(a.get("versions"), b.get("versions")):
        yield Change("versions", name, before, after)


def _memory(a: JsonMapping, b: JsonMapping) -> Iterator[Change]:
    for name in _MEMORY:
        yield Change("memory", _NAMES[name], a.get(name), b.get(name), "B", "compiler")
    if a and b:
        for name, before, after in _both(a.get("purposes"), b.get("purposes")):
            yield Change("memory", name, before or 0, after or 0, "B", "compiler", is_part=True)


def _time(a: Report, b: Report) -> Iterator[Change]:
    old, new = a.get("prediction"), b.get("prediction")
    if not old or not new:
        yield Change("time", "step", _step_or_reason(a), _step_or_reason(b), origin="model")
        return
    seen = [" ".join(one.get("caveats") or ()) for one in (old, new)]
    if seen[0] == seen[1]:
        for name, unit in _TIMES:
            yield Change("time", _NAMES[name], old.get(name), new.get(name), unit, "model")
    else:  # one of the two is without something that the other counts: no difference can be told
        yield Change("time", "step", _step_or_reason(a), _step_or_reason(b), origin="model")
        before, after = (one or "nothing" for one in seen)
        yield Change("time", "not counted", before, after, origin="model")
    for name, before, after in _both(old.get("seconds_by_cause"), new.get("seconds_by_cause")):
        yield Change("time", name, before or 0, after or 0, "s", "model", is_part=True)


def _programs(a: JsonMapping, b: JsonMapping) -> Iterator[Change]:
    """Yield the step time of a captured program that runs several programs, and figures of each."""
    rows = [{row["name"]: row for row in one.get("programs", ())} for one in (a, b)]
    if min(map(len, rows)) < 2:
        return
    before, after = (one["step_time_s"]["value"] for one in (a, b))
    yield Change("time", "step of all programs", before, after, "s", "model")
    for name, old, new in _both(*rows):
        memory = [(row or {}).get("total_bytes") for row in (old, new)]
        yield Change("memory", f"{name}, HBM per device", *memory, unit="B", origin="compiler")
        times = [(row or {}).get("step_time_s") for row in (old, new)]
        yield Change("time", f"{name}, one call", *times, unit="s", origin="model")


def _step_or_reason(report: Report) -> str:
    prediction = report.get("prediction")
    if prediction:
        step = seconds_text(prediction["step_time_s"])
        return f"at least {step}" if prediction.get("caveats") else step
    return f"none: {report.get('no_prediction') or 'not predicted'}"


def _communication(a: Report, b: Report) -> Iterator[Change]:
    if "collectives" not in a or "collectives" not in b:
        return  # a report without a prediction knows of none
    figures: tuple[tuple[str, str, Unit, str], ...] = (
        ("exposed_s", "exposed", "s", "model"),
        ("bytes", "bytes", "B", "compiler"),
        ("times", "times", "count", "compiler"),
    )
    for kind, before, after in _both(_by_kind(a), _by_kind(b)):
        for name, label, unit, origin in figures:
            old, new = ((sums or {}).get(name, 0) for sums in (before, after))
            yield Change("communication", f"{kind}, {label}", old, new, unit, origin)


def _by_kind(report: Report) -> dict[str, dict[str, float]]:
    """Return sums over a step by kind and group size."""
    sums: dict[str, dict[str, float]] = {}
    for row in report.get("collectives") or ():
        total = sums.setdefault(f"{row['kind']} over {row['group_size']}", {})
        total["times"] = total.get("times", 0) + row["times"]
        total["bytes"] = total.get("bytes", 0) + row["bytes"] * row["times"]
        total["exposed_s"] = total.get("exposed_s", 0.0) + row["exposed_s"]
    return sums


def _both(a: object, b: object) -> Iterator[tuple[str, Any, Any]]:
    """Yield every key of either mapping with both values."""
    before, after = (cast("JsonMapping", one or {}) for one in (a, b))
    for name in {**before, **after}:
        yield name, before.get(name), after.get(name)


def _slice(report: Report) -> str | None:
    return (report.get("slice") or {}).get("name")


def _equal(before: object, after: object) -> bool:
    if isinstance(before, float) and isinstance(after, int | float):
        return abs(before - after) <= _SAME * max(abs(before), abs(after))
    return before == after


def _word(value: Any, unit: Unit) -> str:
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        items = cast("JsonMapping", value).items()
        return ", ".join(f"{name}={inner}" for name, inner in items) or "none"
    words = {"B": bytes_text, "s": seconds_text, "share": "{:.1%}".format}
    if unit in words:
        return words[unit](value)
    return f"{value:,.0f}" if unit == "count" else str(value)
