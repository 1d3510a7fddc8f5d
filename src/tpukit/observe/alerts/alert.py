"""`Alert`: a rule that fires, explained in one sentence with its likely cause."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from ...errors import OUT_OF_MEMORY_ADVICE
from ...hardware.missing import Measured, Missing
from ...records.names import INPUT_STALL, STEP_TIME, TOKENS_RATE
from ...shown import Shown
from .rule import WORDS, AlertRule

Metrics = Mapping[str, Measured]
NOTHING = "no other metric explains it"
INPUT_SHARE, FULL, BUSY = 0.1, 0.9, 0.9
SLOW = ("utilization", "duty_cycle", "tensorcore_utilization", "mfu", "current_tflops")
SLOW_STEP = (STEP_TIME, TOKENS_RATE, "samples_per_s", "computation_efficiency")
MEMORY = ("memory_usage_gb", "memory_peak_gb", "memory_total_gb", "memory_usage_share")


def likely_cause(metric: str, metrics: Metrics) -> str:
    """Return the first explanation that the other metrics support."""
    explanations: tuple[Callable[[Metrics], str | None], ...] = ()
    if metric in (*SLOW, *SLOW_STEP):
        explanations = (_input, _throttled, _link, _host_cpu, _host_memory, _no_work, _network)
    elif metric in MEMORY:
        explanations = (_memory,)
    elif metric == "loss":
        explanations = (_loss,)
    elif metric.startswith("input_stall"):
        explanations = (_host_cpu, _host_memory, _input)
    elif metric.startswith("host_memory"):
        explanations = (_host_memory,)
    elif metric in ("power_watts", "temperature_celsius", "throttle_score"):
        explanations = (_throttled, _busy)
    for explain in explanations:
        cause = explain(metrics)
        if cause is not None:
            return cause
    return NOTHING


def _input(metrics: Metrics) -> str | None:
    stall, step = _get(metrics, INPUT_STALL), _get(metrics, STEP_TIME)
    if stall is None or not step or stall / step < INPUT_SHARE:
        return None
    return (
        f"the input pipeline: {stall:.3g} s of a step of {step:.3g} s are spent waiting for the "
        "batch (more workers, more read-ahead, or data nearer by)"
    )


def _throttled(metrics: Metrics) -> str | None:
    score = _get(metrics, "throttle_score")
    if not score:
        return None
    return f"a chip is throttled (score {score:.0f} of 10): its power or temperature is at a limit"


def _link(metrics: Metrics) -> str | None:
    health = _get(metrics, "ici_link_health")
    if not health:
        return None
    return f"an ICI link has errors (score {health:.0f} of 10): ask for another slice"


def _host_cpu(metrics: Metrics) -> str | None:
    busy = _get(metrics, "host_cpu_utilization")
    if busy is None or busy < BUSY:
        return None
    return f"the host's CPUs are {busy:.0%} busy, so it feeds the chips too slowly"


def _host_memory(metrics: Metrics) -> str | None:
    used, total = _get(metrics, "host_memory_usage_gb"), _get(metrics, "host_memory_total_gb")
    if used is None or not total or used / total < FULL:
        return None
    return f"the host's memory is {used / total:.0%} full ({used:.1f} of {total:.1f} GB)"


def _no_work(metrics: Metrics) -> str | None:
    queue, idle = _get(metrics, "hlo_queue_size"), _get(metrics, "idle_seconds")
    if idle is not None and idle >= 1:
        return f"a chip has had no work for {idle:.0f} s: the program is between steps, or hangs"
    if queue == 0:
        return "no program waits for the chips: the host dispatches too slowly"
    return None


def _network(metrics: Metrics) -> str | None:
    share = _get(metrics, "communication_overhead")
    if share is None or share < INPUT_SHARE:
        return None
    return f"communication takes {share:.0%} of a step: another layout, or fewer slices"


def _memory(metrics: Metrics) -> str | None:
    used, total = _get(metrics, "memory_usage_gb"), _get(metrics, "memory_total_gb")
    if used is None or not total:
        return None
    return (
        f"the fullest chip has {used:.1f} of {total:.1f} GB in use, {total - used:.1f} GB are left "
        f"({OUT_OF_MEMORY_ADVICE}; `tpukit check` lists the largest buffers)"
    )


def _loss(metrics: Metrics) -> str | None:
    step = _get(metrics, "step")
    return None if step is None else f"the loss is off at step {step:.0f}: see train.log"


def _busy(metrics: Metrics) -> str | None:
    busy = _get(metrics, "utilization")
    return None if busy is None else f"the chips are {busy:.0%} busy"


def _get(metrics: Metrics, name: str) -> float | None:
    value = metrics.get(name)
    return None if value is None or isinstance(value, Missing) else value


UNITS = {"_gb": " GB", "_s": " s", "_seconds": " s", "_watts": " W", "tflops": " TFLOP/s"}
SHARES = ("utilization", "duty_cycle", "mfu", "goodput", "overhead", "efficiency")


@dataclass(frozen=True, kw_only=True)
class Alert(Shown):
    """A rule that fires.

    Attributes:
        rule: The rule.
        value: The metric's value.
        since: Unix seconds at which the value went out of bounds.
        time: Unix seconds of the alert.
        host: The machine whose monitor raised the alert.
        cause: The likely cause, from the other metrics.
    """

    rule: AlertRule
    value: float
    since: float
    time: float
    host: str
    cause: str
    _facts = (
        "alert=name metric=rule.metric condition=rule.condition threshold=rule.threshold value "
        "since time host cause explanation"
    )

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
        """Build the alert from all metrics of this time."""
        value = float(metrics[rule.metric])
        cause = likely_cause(rule.metric, metrics)
        return cls(rule=rule, value=value, since=since, time=time, host=host, cause=cause)

    @property
    def name(self) -> str:
        """The rule's name."""
        return self.rule.name

    @property
    def explanation(self) -> str:
        """One sentence with value, threshold, duration, start, host and likely cause."""
        rule = self.rule
        began = datetime.fromtimestamp(self.since, UTC).strftime("%H:%M:%S UTC")
        lasted = max(0.0, self.time - self.since)
        held = f" for {lasted:.0f} s, since {began}" if lasted >= 1 else f" since {began}"
        return (
            f"{_spoken(rule.metric)} on {self.host} is {show(rule.metric, self.value)}, "
            f"{WORDS[rule.condition]} {show(rule.metric, rule.threshold)}{held}. "
            f"Likely cause: {self.cause}."
        )

    def __str__(self) -> str:
        return self.explanation


def show(metric: str, value: float) -> str:
    """Return a value as text: shares in percent, sizes and times with their unit."""
    if metric.endswith(SHARES):
        return f"{value:.1%}"
    unit = next((unit for ending, unit in UNITS.items() if metric.endswith(ending)), "")
    return f"{value:.4g}{unit}"


def _spoken(metric: str) -> str:
    """Return the metric's name without its unit, which the value shows."""
    ending = next((unit for unit in UNITS if unit[0] == "_" and metric.endswith(unit)), "")
    return metric.removesuffix(ending).replace("_", " ")
