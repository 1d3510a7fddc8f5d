"""A predicted step beside a measured one, op by op, and the ops without a partner.

The same compiler gives an op the same name for the same program, so on the same hardware ops are
matched by name. Another compiler fuses differently. There ops are matched by `op_name`, which jax
writes into every op before compiling, and ops that are left by their scope, because two compilers
may divide a layer into fusions differently. Steps of different kinds of devices are compared by
shares only, because seconds on a CPU do not predict seconds on a TPU.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...hardware.figure import seconds_text
from ...plain_data import JsonObject
from ...shown import Facts, Renderable, Shown
from .analysis import OpShare
from .steps import MeasuredStep, PredictedStep

ROWS_SHOWN, NAME_SHOWN = 25, 60
OTHER_DEVICE = "model against a measurement on another device"
SAME_DEVICE = "model against a measurement on the same kind of device"
# The outermost jits are named after their caller, so that they differ between the two sides.
_OUTER = re.compile(r"^(?:(?:p?jit\([^()]*\)|call_exported)/)+")


@dataclass(frozen=True)
class OpComparison(Facts):
    """One op, or all ops with the same origin, on both sides.

    Attributes:
        name: The instruction, or the common origin in the user's program.
        matched_by: "name", "op_name" or "scope" (all of one layer, pass or loop together).
        predicted_s: Predicted seconds in one step on one device.
        measured_s: Measured seconds in one step on one device.
        predicted_share: Share of all predicted ops.
        measured_share: Share of all measured ops.
    """

    name: str
    matched_by: str
    predicted_s: float
    measured_s: float
    predicted_share: float
    measured_share: float


@dataclass(frozen=True)
class StepComparison(Shown):
    """A predicted step beside a measured one.

    Attributes:
        is_same_hardware: Whether seconds can be compared.
        ops: Matched ops, the largest difference first.
        only_predicted: Predicted ops without a partner, the heaviest first.
        only_measured: Measured ops without a partner, the heaviest first.
    """

    predicted: PredictedStep
    measured: MeasuredStep
    is_same_hardware: bool
    ops: tuple[OpComparison, ...]
    only_predicted: tuple[OpShare, ...]
    only_measured: tuple[OpShare, ...]

    @property
    def header(self) -> str:
        """The two sides of the comparison."""
        words = SAME_DEVICE if self.is_same_hardware else OTHER_DEVICE
        return f"{words}: {self.predicted.where} against {self.measured.where}"

    @property
    def ratio(self) -> float | None:
        """Measured over predicted step; None between different devices."""
        if not self.is_same_hardware or not self.predicted.step_time_s:
            return None
        return self.measured.step_time_s / self.predicted.step_time_s

    def to_dict(self) -> JsonObject:
        """Return plain data, with the seconds of both sides even where they cannot be compared."""
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

    def __rich__(self) -> Renderable:
        """Return the header, the matched ops, and the unmatched ops with totals."""
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
    def _rest(side: str, ops: Sequence[OpShare], all_ops: Iterable[OpShare]) -> Iterator[Any]:
        from rich.text import Text

        if not ops:
            return
        seconds, total = _seconds(ops), _seconds(all_ops)
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
    totals = _seconds(predicted.ops) or 1.0, _seconds(measured.ops) or 1.0
    compared = [
        OpComparison(name, by, ours_s, theirs_s, ours_s / totals[0], theirs_s / totals[1])
        for name, by, ours_s, theirs_s in rows
    ]
    compared.sort(key=lambda op: -_difference(op, same))
    return StepComparison(predicted, measured, same, tuple(compared), tuple(ours), tuple(theirs))


def origin_of(op_name: str) -> str:
    """Return an op's origin in the user's program, without the outermost jit."""
    return _OUTER.sub("", op_name)


def scope_of(op_name: str) -> str:
    """Return the scope of an op: its origin without the last part."""
    return origin_of(op_name).rpartition("/")[0]


def _match(
    ours: list[OpShare],
    theirs: list[OpShare],
    key: Callable[[OpShare], str],
    by: str,
    rows: list[tuple[str, str, float, float]],
) -> tuple[list[OpShare], list[OpShare]]:
    """Match ops with the same key; return the unmatched ops of both sides."""
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
    """Return the end of a long origin, which tells it from others."""
    return name if len(name) <= NAME_SHOWN else "…" + name[-NAME_SHOWN:]


def _seconds(ops: Iterable[OpShare]) -> float:
    return sum(op.seconds for op in ops)


def _difference(op: OpComparison, same: bool) -> float:
    if same:
        return abs(op.predicted_s - op.measured_s)
    return abs(op.predicted_share - op.measured_share)


def _unmatched(ops: Sequence[OpShare]) -> JsonObject:
    return {"seconds": _seconds(ops), "ops": [op.to_dict() for op in ops]}
