"""`Alert`: what fired, in numbers and in one sentence a person can act on."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ...hardware.missing import Measured
from ...shown import Shown
from .causes import likely_cause
from .rule import WORDS, AlertRule

UNITS = {"_gb": " GB", "_s": " s", "_seconds": " s", "_watts": " W", "tflops": " TFLOP/s"}
SHARES = ("utilization", "duty_cycle", "mfu", "goodput", "overhead", "efficiency")


@dataclass(frozen=True, kw_only=True)
class Alert(Shown):
    """A rule that fires.

    Attributes:
        rule: Which.
        value: Of the metric now.
        since: Unix seconds from which on it has been out of bounds.
        time: Unix seconds now.
        host: The machine that noticed.
        cause: What is likely behind it, from the other metrics.
    """

    rule: AlertRule
    value: float
    since: float
    time: float
    host: str
    cause: str

    @classmethod
    def of(
        cls,
        rule: AlertRule,
        metrics: Mapping[str, Measured],
        *,
        since: float,
        time: float,
        host: str,
    ) -> "Alert":
        """Make it from everything that is measured at this time."""
        value = float(metrics[rule.metric])
        cause = likely_cause(rule.metric, metrics)
        return cls(rule=rule, value=value, since=since, time=time, host=host, cause=cause)

    @property
    def name(self) -> str:
        """The rule's name."""
        return self.rule.name

    @property
    def explanation(self) -> str:
        """One sentence: value, threshold, how long, since when, on which host, and why."""
        rule = self.rule
        began = datetime.fromtimestamp(self.since, UTC).strftime("%H:%M:%S UTC")
        lasted = max(0.0, self.time - self.since)
        held = f" for {lasted:.0f} s, since {began}" if lasted >= 1 else f" since {began}"
        return (
            f"{_spoken(rule.metric)} on {self.host} is {show(rule.metric, self.value)}, "
            f"{WORDS[rule.condition]} {show(rule.metric, rule.threshold)}{held}. "
            f"Likely cause: {self.cause}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as a webhook gets it."""
        return {
            "alert": self.name,
            "metric": self.rule.metric,
            "condition": self.rule.condition,
            "threshold": self.rule.threshold,
            "value": self.value,
            "since": self.since,
            "time": self.time,
            "host": self.host,
            "cause": self.cause,
            "explanation": self.explanation,
        }

    def __str__(self) -> str:
        return self.explanation


def show(metric: str, value: float) -> str:
    """Return a value as a person reads it: shares in percent, sizes and times with their unit."""
    if metric.endswith(SHARES):
        return f"{value:.1%}"
    unit = next((unit for ending, unit in UNITS.items() if metric.endswith(ending)), "")
    return f"{value:.4g}{unit}"


def _spoken(metric: str) -> str:
    """Return the metric's name without its unit, which its value has."""
    ending = next((one for one in UNITS if one[0] == "_" and metric.endswith(one)), "")
    return metric.removesuffix(ending).replace("_", " ")
