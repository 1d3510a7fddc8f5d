"""A predicted step beside a measured one, op by op, and what neither side found in the other.

The same compiler gives an op the same name for the same program, so on the same hardware ops are
matched by name. Another compiler fuses otherwise; there `op_name`, which jax writes into every op
before any compiler sees it, says what belongs together; where compilers put the border between two
fusions differently, the scope around both still does. What was predicted for one kind of device
and measured on another is compared by shares only: seconds of a CPU say nothing of a TPU.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...hardware.figure import seconds_text
from ...shown import Shown
from .analysis import OpShare
from .steps import MeasuredStep, PredictedStep

ROWS_SHOWN, NAME_SHOWN = 25, 60
OTHER_DEVICE = "model against a measurement on another device"
SAME_DEVICE = "model against a measurement on the same kind of device"
# The outermost jits are called after whoever called them; what is inside is the user's.
_OUTER = re.compile(r"^(?:(?:p?jit\([^()]*\)|call_exported)/)+")


@dataclass(frozen=True)
class OpComparison:
    """One op, or all ops of one origin, on both sides.

    Attributes:
        name: The instruction, or the origin in the user's program that several share.
        matched_by: "name", "op_name" or "scope" (all of one layer, pass or loop together).
        predicted_s: In one step on one device.
        measured_s: The same.
        predicted_share: Of all ops of its side.
        measured_share: The same.
    """

    name: str
    matched_by: str
    predicted_s: float
    measured_s: float
    predicted_share: float
    measured_share: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))


@dataclass(frozen=True)
class StepComparison(Shown):
    """A predicted step beside a measured one.

    Attributes:
        is_same_hardware: Whether seconds can be held against each other.
        ops: Matched ops, the largest difference first.
        only_predicted: Ops without a partner, the heaviest first.
        only_measured: The same of the other side.
    """

    predicted: PredictedStep
    measured: MeasuredStep
    is_same_hardware: bool
    ops: tuple[OpComparison, ...]
    only_predicted: tuple[OpShare, ...]
    only_measured: tuple[OpShare, ...]

    @property
    def header(self) -> str:
        """What is compared with what."""
        words = SAME_DEVICE if self.is_same_hardware else OTHER_DEVICE
        return f"{words}: {self.predicted.where} against {self.measured.where}"

    @property
    def ratio(self) -> float | None:
        """Measured over predicted step; None between different devices."""
        if not self.is_same_hardware or not self.predicted.step_time_s:
            return None
        return self.measured.step_time_s / self.predicted.step_time_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data; seconds of both sides are in it whatever can be said of them."""
        return {
            "header": self.header,
            "is_same_hardware": self.is_same_hardware,
            "ratio": self.ratio,
            "predicted": {
                "origin": "model",
                "where": self.predicted.where,
                "step_time_s": self.predicted.step_time_s,
            },
            "measured": {
                "origin": "measured",
                "where": self.measured.where,
                "step_time_s": self.measured.step_time_s,
                "steps": self.measured.steps,
            },
            "ops": [op.to_dict() for op in self.ops],
            "only_predicted": _unmatched(self.only_predicted),
            "only_measured": _unmatched(self.only_measured),
        }

    def __rich__(self) -> Any:
        """The header, the matched ops, and the rest with its totals."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        step = (
            f"step: {seconds_text(self.predicted.step_time_s)} predicted [model], "
            f"{seconds_text(self.measured.step_time_s)} measured, mean of {self.measured.steps}"
        )
        step += f" ({self.ratio:.2f}× the prediction)" if self.ratio is not None else ""
        parts: list[Any] = [Text(self.header, style="bold"), Text(step)]
        if not self.is_same_hardware:
            parts.append(Text("only shares can be compared: devices differ in speed", style="dim"))
        table = Table("op", box=None, pad_edge=False)
        seconds = ("predicted", "measured") if self.is_same_hardware else ()
        for title in (*seconds, "of predicted", "of measured", "matched by"):
            table.add_column(title, justify="right")
        for op in self.ops[:ROWS_SHOWN]:
            times = (seconds_text(op.predicted_s), seconds_text(op.measured_s))
            table.add_row(
                Text(_end_of(op.name)),
                *(times if self.is_same_hardware else ()),
                f"{op.predicted_share:.1%}",
                f"{op.measured_share:.1%}",
                op.matched_by,
            )
        parts.append(table if self.ops else Text("no op has a partner on the other side"))
        if len(self.ops) > ROWS_SHOWN:
            parts.append(Text(f"and {len(self.ops) - ROWS_SHOWN} more matched ops", style="dim"))
        parts += self._rest("predicted", self.only_predicted, self.predicted.ops)
        parts += self._rest("measured", self.only_measured, self.measured.ops)
        return Group(*parts)

    @staticmethod
    def _rest(side: str, ops: Sequence[OpShare], whole: Iterable[OpShare]) -> Iterator[Any]:
        from rich.text import Text

        if not ops:
            return
        seconds, total = _seconds(ops), _seconds(whole)
        first = ", ".join(f"{op.name} ({seconds_text(op.seconds)})" for op in ops[:4])
        yield Text(
            f"only {side}: {len(ops)} ops, {seconds_text(seconds)}, {seconds / total:.1%} of its "
            f"ops: {first}{' …' if len(ops) > 4 else ''}"
        )


def compare(predicted: PredictedStep, measured: MeasuredStep) -> StepComparison:
    """Match the ops of a predicted and a measured step."""
    same = measured.device_kind in predicted.device_kinds
    ours, theirs = list(predicted.ops), list(measured.ops)
    rows: list[tuple[str, str, float, float]] = []
    if same:
        ours, theirs = _match(ours, theirs, lambda op: op.name, "name", rows)
    ours, theirs = _match(ours, theirs, lambda op: origin_of(op.op_name), "op_name", rows)
    ours, theirs = _match(ours, theirs, lambda op: scope_of(op.op_name), "scope", rows)
    whole = _seconds(predicted.ops) or 1.0, _seconds(measured.ops) or 1.0
    compared = [
        OpComparison(name, by, ours_s, theirs_s, ours_s / whole[0], theirs_s / whole[1])
        for name, by, ours_s, theirs_s in rows
    ]
    compared.sort(key=lambda op: -_difference(op, same))
    return StepComparison(predicted, measured, same, tuple(compared), tuple(ours), tuple(theirs))


def origin_of(op_name: str) -> str:
    """Where in the user's program an op comes from, without the jit around all of it."""
    return _OUTER.sub("", op_name)


def scope_of(op_name: str) -> str:
    """What an op stands in: its origin without the last part."""
    return origin_of(op_name).rpartition("/")[0]


def _match(
    ours: list[OpShare],
    theirs: list[OpShare],
    key: Callable[[OpShare], str],
    by: str,
    rows: list[tuple[str, str, float, float]],
) -> tuple[list[OpShare], list[OpShare]]:
    """Pair what has the same key; returns what is left over on both sides."""
    groups: defaultdict[str, tuple[list[OpShare], list[OpShare]]] = defaultdict(lambda: ([], []))
    for side, ops in enumerate((ours, theirs)):
        for op in ops:
            groups[key(op)][side].append(op)
    left: tuple[list[OpShare], list[OpShare]] = ([], [])
    for name, (mine, yours) in groups.items():
        if name and mine and yours:
            rows.append((name, by, _seconds(mine), _seconds(yours)))
        else:
            left[0].extend(mine)
            left[1].extend(yours)
    for side in left:
        side.sort(key=lambda op: -op.seconds)
    return left


def _end_of(name: str) -> str:
    """A long origin from its last parts, which tell it from others."""
    return name if len(name) <= NAME_SHOWN else "…" + name[-NAME_SHOWN:]


def _seconds(ops: Iterable[OpShare]) -> float:
    return sum(op.seconds for op in ops)


def _difference(op: OpComparison, same: bool) -> float:
    if same:
        return abs(op.predicted_s - op.measured_s)
    return abs(op.predicted_share - op.measured_share)


def _unmatched(ops: Sequence[OpShare]) -> dict[str, Any]:
    return {"seconds": _seconds(ops), "ops": [op.to_dict() for op in ops]}
