"""`AlertRule`: when a metric is out of bounds, for how long it has to be, and when it is back."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from ...errors import TPUValidationError
from ...hardware.missing import Measured, Missing

Condition = Literal["<", "<=", ">", ">="]
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
WORDS = {"<": "below", "<=": "at or below", ">": "above", ">=": "at or above"}
COOL_DOWN_S = 300.0


@dataclass(frozen=True, kw_only=True)
class AlertRule:
    """A condition on one metric.

    Attributes:
        metric: A key of `get_current_metrics()`.
        condition: "<", "<=", ">" or ">=".
        threshold: What the metric is compared with, in its own unit; shares are 0 to 1.
        for_s: How long the condition has to hold, without a break, before the alert fires.
        clear: The value at which a firing alert is over; the threshold by default. One that lies
            away from it (below it for ">") keeps a metric at the edge from firing again and again.
        cool_down_s: From one notification to the next at least.
        name: What the alert is called; made from the condition by default.
    """

    metric: str
    condition: Condition
    threshold: float
    for_s: float = 0.0
    clear: float | None = None
    cool_down_s: float = COOL_DOWN_S
    name: str = ""

    def __post_init__(self) -> None:
        if self.condition not in get_args(Condition):
            raise TPUValidationError(
                f"condition={self.condition!r} compares nothing; give one of "
                f"{', '.join(get_args(Condition))}."
            )
        if self.for_s < 0 or self.cool_down_s < 0:
            raise TPUValidationError(
                f"for_s={self.for_s:g} and cool_down_s={self.cool_down_s:g} are durations; "
                "give 0 or more seconds."
            )
        if self.clear is not None and self.is_met(self.clear) and self.clear != self.threshold:
            side = "at least" if self.condition in ("<", "<=") else "at most"
            raise TPUValidationError(
                f"clear={self.clear:g} still meets '{self.condition} {self.threshold:g}', so the "
                f"alert would never end; give {side} {self.threshold:g}."
            )
        if not self.name:
            object.__setattr__(self, "name", f"{self.metric} {self.condition} {self.threshold:g}")

    def is_met(self, value: Measured) -> bool:
        """Whether the value is out of bounds; a missing one is not."""
        if isinstance(value, Missing):
            return False
        return _COMPARE[self.condition](value, self.threshold)

    def is_cleared(self, value: Measured) -> bool:
        """Whether the value ends an alert that fires; a missing one does not."""
        if isinstance(value, Missing):
            return False
        bound = self.threshold if self.clear is None else self.clear
        return not self.is_met(value) and not _COMPARE[self.condition](value, bound)
