"""The state of a rule: quiet, pending, or firing; and when somebody is told."""

from ...hardware.missing import Measured
from .rule import AlertRule


class RuleState:
    """Follows one rule over time.

    A value out of bounds makes it pending; once it has been so for `for_s` it fires, until a value
    reaches `clear`. A missing value interrupts what is pending, because nobody knows, and leaves
    what fires as it is, for the same reason. Each time it fires is told once, at a value that is
    out of bounds; where that falls within the cool-down of the time before, it is told after it,
    if it still fires.

    Times are seconds of a clock that only goes forward.
    """

    def __init__(self, rule: AlertRule) -> None:
        self.rule = rule
        self.since: float | None = None  # when the value went out of bounds
        self.is_firing = False
        self._told = False
        self._told_at: float | None = None

    def observe(self, value: Measured, now: float) -> bool:
        """Take the newest value; True when somebody is to be told now."""
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
