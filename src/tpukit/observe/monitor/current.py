"""`CurrentMetrics`: the newest readings of a host as one mapping, under the documents' names."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from ...errors import did_you_mean
from ...hardware.missing import Measured, Missing, plain
from ...plain_data import JsonObject
from ...records.names import INPUT_STALL, STEP_TIME, TOKENS_RATE
from ...shown import Renderable, Shown
from ..readings import METRICS, Reading, Sample

Combine = Callable[[list[float]], float]
GB = 1e-9


@dataclass(frozen=True, slots=True)
class MetricKey:
    """How a key is computed from a metric of the glossary.

    Attributes:
        metric: The metric's name.
        combine: Combines the numbers of several chips.
        scale: Factor to the key's unit.
    """

    metric: str
    combine: Combine = fmean
    scale: float = 1.0


# Over several chips, shares are averaged, memory and warnings are the worst, power is added up.
KEYS: dict[str, MetricKey] = {
    "utilization": MetricKey("duty_cycle"),
    "duty_cycle": MetricKey("duty_cycle"),
    "tensorcore_utilization": MetricKey("tensorcore_utilization"),
    "memory_bandwidth_utilization": MetricKey("memory_bandwidth_utilization"),
    "memory_usage_gb": MetricKey("memory_used", max, GB),
    "memory_total_gb": MetricKey("memory_total", max, GB),
    "memory_peak_gb": MetricKey("memory_peak", max, GB),
    "current_tflops": MetricKey("tflops"),
    "mfu": MetricKey("mfu"),
    "computation_efficiency": MetricKey("mfu"),
    "communication_overhead": MetricKey("communication_overhead"),
    "step": MetricKey("step"),
    STEP_TIME: MetricKey("step_time_seconds"),
    INPUT_STALL: MetricKey("input_stall_seconds"),
    "loss": MetricKey("loss"),
    TOKENS_RATE: MetricKey("tokens_per_second_per_chip"),
    "samples_per_s": MetricKey("samples_per_second"),
    "power_watts": MetricKey("power_watts", sum),
    "temperature_celsius": MetricKey("temperature_celsius", max),
    "throttle_score": MetricKey("throttle_score", max),
    "ici_link_health": MetricKey("ici_link_health", max),
    "hlo_queue_size": MetricKey("hlo_queue_size", min),
    "idle_seconds": MetricKey("idle_seconds", max),
    "dcn_latency_s": MetricKey("dcn_latency_seconds", max),
    "collective_latency_s": MetricKey("collective_latency_seconds", max),
    "host_cpu_utilization": MetricKey("host_cpu_utilization"),
    "host_memory_usage_gb": MetricKey("host_memory_used", sum, GB),
    "host_memory_total_gb": MetricKey("host_memory_total", sum, GB),
}
MEDIAN = "0.5"
NOT_YET = "no reading has been taken yet"


@dataclass(frozen=True, eq=False)
class CurrentMetrics(Shown, Mapping[str, Measured]):
    """The current metrics, read like a dictionary or by attribute.

    Every key is always present. A missing figure formats as a dash under any format spec and has
    its reason in `.reason`. Sizes are in GB of 10^9 bytes; shares are 0 to 1. `utilization` is the
    share of time in which the chips were busy (duty cycle), the mean over the chips of this host;
    `mfu` is how well they were used. Memory is that of the fullest chip.

    Attributes:
        figures: The mapping itself.
        origins: The source of each figure.
        time: Unix seconds.
        readings: The readings behind the figures, with each source's numbers per chip.
    """

    figures: Mapping[str, Measured]
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    time: float = 0.0
    readings: tuple[Reading, ...] = ()

    def __getitem__(self, name: str) -> Measured:
        return self.figures[name]

    def __getattr__(self, name: str) -> Measured:
        # Called only for names that are no attribute. An object that is being copied has no figures
        # yet.
        figures: Mapping[str, Measured] = self.__dict__.get("figures", {})
        if name not in figures:
            raise AttributeError(
                f"there is no metric {name!r}; {', '.join(figures)} are available."
                + did_you_mean(name, figures)
            )
        return figures[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.figures)

    def __len__(self) -> int:
        return len(self.figures)

    @property
    def missing(self) -> dict[str, str]:
        """The keys without a number, each with the reason."""
        return {
            name: value.reason for name, value in self.figures.items() if isinstance(value, Missing)
        }

    def to_dict(self) -> JsonObject:
        """Return plain data: numbers, null for missing ones, and the reasons."""
        numbers = {name: plain(value) for name, value in self.figures.items()}
        return {"time": self.time, **numbers, "missing": self.missing, "origins": {**self.origins}}

    def __rich__(self) -> Renderable:
        """Return a table: figure, value, and its source or why it is missing."""
        from rich.table import Table

        table = Table("figure", "value", "source", box=None)
        for name, value in self.figures.items():
            why = value.reason if isinstance(value, Missing) else self.origins.get(name, "")
            table.add_row(name, f"{value:,.4g}", why)
        return table


def summarize(
    readings: Iterable[Reading], *, absent: Mapping[str, str] | None = None, reason: str = NOT_YET
) -> CurrentMetrics:
    """Return the readings of a host as one mapping; the first reading with a metric counts.

    Args:
        readings: One per source, the most reliable source first.
        absent: Metrics without any source, with the reason.
        reason: For a metric that no reading mentions.
    """
    samples: dict[str, tuple[str, list[Sample]]] = {}
    reasons: dict[str, list[str]] = {}
    newest, taken = 0.0, tuple(readings)
    for reading in taken:
        newest = max(newest, reading.time)
        own: dict[str, list[Sample]] = {}
        for sample in reading.samples:
            if sample.labels.get("quantile", MEDIAN) == MEDIAN:
                own.setdefault(sample.metric, []).append(sample)
        for metric, chip_samples in own.items():
            samples.setdefault(metric, (reading.source, chip_samples))
        for metric, why in reading.missing.items():
            listed = reasons.setdefault(metric, [])
            if why not in listed:
                listed.append(why)
    figures: dict[str, Measured] = {}
    origins: dict[str, str] = {}
    for name, key in _keys(samples):
        if key.metric in samples:
            source, chip_samples = samples[key.metric]
            figures[name] = key.combine([sample.value for sample in chip_samples]) * key.scale
            origin = chip_samples[0].labels.get("origin")
            origins[name] = f"{source} ({origin})" if origin else source
        else:
            no_source = (absent or {}).get(key.metric)
            why_missing = reasons.get(key.metric) or [no_source or reason]
            figures[name] = Missing("; ".join(why_missing))
    return CurrentMetrics(figures, origins, newest or time.time(), taken)


def _keys(samples: Mapping[str, object]) -> Iterator[tuple[str, MetricKey]]:
    """Yield every key, and metrics of Orbax and Grain under their own names."""
    yield from KEYS.items()
    for metric in samples:
        if metric not in METRICS:
            yield metric, MetricKey(metric, sum)
