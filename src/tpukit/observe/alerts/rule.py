"""`AlertRule`: a condition on a metric, and `RuleState`: whether it is quiet, pending or firing."""

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
        threshold: The limit in the metric's unit; shares are 0 to 1.
        for_s: Seconds for which the condition must hold without a break before the alert fires.
        clear: The value that ends a firing alert; the threshold by default. A value on the good
            side of the threshold (below it for ">") avoids repeated alerts at the edge.
        cool_down_s: The least seconds between two notifications.
        name: The alert's name; made from the condition by default.
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
                f"condition={self.condition!r} is no comparison; give one of "
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
        """Return whether the value is out of bounds; a missing value is not."""
        if isinstance(value, Missing):
            return False
        return _COMPARE[self.condition](value, self.threshold)

    def is_cleared(self, value: Measured) -> bool:
        """Return whether the value ends a firing alert; a missing value does not."""
        if isinstance(value, Missing):
            return False
        bound = self.threshold if self.clear is None else self.clear
        return not self.is_met(value) and not _COMPARE[self.condition](value, bound)


class RuleState:
    """Follows one rule over time.

    A value out of bounds makes the rule pending. After `for_s` seconds out of bounds it fires,
    until a value reaches `clear`. A missing value ends a pending state and does not change a firing
    one. Each firing is notified once, at a value out of bounds. Within the cool-down of the last
    notification it is delayed until the cool-down is over, if the rule still fires then.

    Times are seconds of a monotonic clock.
    """

    def __init__(self, rule: AlertRule) -> None:
        self.rule = rule
        self.since: float | None = None  # when the value went out of bounds
        self.is_firing = False
        self._told = False
        self._told_at: float | None = None

    def observe(self, value: Measured, now: float) -> bool:
        """Update the state with the newest value; return whether to notify now."""
        rule = self.rule
        if self.is_firing:
            if rule.is_cleared(value):
                self.is_firing, self._told, self.since = False, False, None
        elif not rule.is_met(value):
            self.since = None
        else:
            self.since = now if self.since is None else self.since
            self.is_firing = now - self.since >= rule.for_s
        if not self.is_firing or self._told or not rule.is_met(value):
            return False
        if self._told_at is not None and now - self._told_at < rule.cool_down_s:
            return False
        self._told, self._told_at = True, now
        return True
