"""Readings: numbers of one source at one time; their metrics; protocols of sources and exporters.

Shares are 0 to 1 here. libtpu and GKE use percent, and sources and exporters convert.
"""

import math
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from ..plain_data import JsonMapping, JsonObject
from ..records.lines import is_number, is_time, parse_lines
from ..records.names import INPUT_STALL, LOSS, MFU, STEP, STEP_TIME, TOKENS_RATE
from ..shown import Shown

Scope = Literal["chip", "host", "run"]
Unit = Literal["share", "B", "B/s", "s", "W", "°C", "TFLOP/s", "tokens/s", ""]


@dataclass(frozen=True, slots=True)
class Metric:
    """The meaning of one metric.

    Attributes:
        name: Its name in samples, alerts and files.
        unit: Of its value.
        meaning: One sentence.
        scope: Whether each chip, each host or the run has one.
        libtpu_name: Its name in libtpu, or "".
        gke_name: Its name in GKE's exporter, or "".
    """

    name: str
    unit: Unit
    meaning: str
    scope: Scope = "chip"
    libtpu_name: str = ""
    gke_name: str = ""


_LATENCY = "megascale.{}.microsecond.cumulative.distribution"
_ALL = (
    Metric(
        "duty_cycle",
        "share",
        "Share of time in which the chip was busy; not how well it was used.",
        libtpu_name="tpu.runtime.tensorcore.dutycycle.percent",
        gke_name="duty_cycle",
    ),
    Metric(
        "tensorcore_utilization",
        "share",
        "Operations of the TensorCore over its peak.",
        libtpu_name="tensorcore_util",
        gke_name="tensorcore_utilization",
    ),
    Metric(
        "memory_bandwidth_utilization",
        "share",
        "Bytes moved to and from HBM over the peak bandwidth.",
        libtpu_name="tpu.runtime.hbm.utilization.percent",
        gke_name="memory_bandwidth_utilization",
    ),
    Metric(
        "memory_used",
        "B",
        "Memory of the chip in use.",
        libtpu_name="tpu.runtime.hbm.memory.usage.bytes",
        gke_name="memory_used",
    ),
    Metric(
        "memory_total",
        "B",
        "Memory of the chip that programs may use.",
        libtpu_name="tpu.runtime.hbm.memory.total.bytes",
        gke_name="memory_total",
    ),
    Metric("memory_peak", "B", "The most memory of the chip that was in use at once."),
    Metric(
        "hlo_queue_size",
        "",
        "Programs that wait for the chip; 0 for a long time means that the host is too slow.",
        libtpu_name="hlo.queue.size.gauge",
    ),
    Metric(
        "hlo_execution_seconds",
        "s",
        "How long programs ran on the chip, by quantile.",
        libtpu_name="hlo.execution.timing.distribution.microseconds",
    ),
    Metric(
        "idle_seconds",
        "s",
        "How long the TensorCore has been idle.",
        libtpu_name="tpu.runtime.tensorcore.idle_duration.seconds",
    ),
    Metric(
        "ici_link_health",
        "",
        "Of each link: 0 healthy, 1 to 5 transient errors, 6 to 9 minor, 10 unusable.",
        libtpu_name="ici_link_health",
    ),
    Metric(
        "throttle_score",
        "",
        "0: not throttled; 1 to 10: slowed down by 10 % to 100 %.",
        libtpu_name="tpu_throttle_score",
    ),
    Metric(
        "dcn_latency_seconds",
        "s",
        "Time of a transfer between slices, by quantile and buffer size.",
        scope="host",
        libtpu_name=_LATENCY.format("dcn_transfer_latencies"),
    ),
    Metric(
        "dcn_inbound_latency_seconds",
        "s",
        "Time of a transfer from another slice at its receiver, by quantile.",
        scope="host",
        libtpu_name=_LATENCY.format("dcn_inbound_transfer_latencies"),
    ),
    Metric(
        "host_to_device_latency_seconds",
        "s",
        "Time of a transfer from host to chip for DCN traffic, by quantile.",
        scope="host",
        libtpu_name=_LATENCY.format("host_to_device_transfer_latencies"),
    ),
    Metric(
        "device_to_host_latency_seconds",
        "s",
        "Time of a transfer from chip to host for DCN traffic, by quantile.",
        scope="host",
        libtpu_name=_LATENCY.format("device_to_host_transfer_latencies"),
    ),
    Metric(
        "collective_latency_seconds",
        "s",
        "Time of a collective between slices from end to end, by quantile.",
        scope="host",
        libtpu_name=_LATENCY.format("collective_end_to_end_latencies"),
    ),
    Metric(
        "host_compute_latency_seconds",
        "s",
        "Time the host computes for collectives between slices, by quantile.",
        scope="host",
        libtpu_name=_LATENCY.format("mxla_compute_latencies"),
    ),
    Metric("power_watts", "W", "Power drawn by the board; TPUs publish none."),
    Metric("temperature_celsius", "°C", "Temperature of the chip."),
    Metric("host_cpu_utilization", "share", "CPUs of the host that are busy.", scope="host"),
    Metric("host_memory_used", "B", "Memory of the host in use.", scope="host"),
    Metric("host_memory_total", "B", "Memory the host has.", scope="host"),
    Metric("step", "", "The newest completed step.", scope="run"),
    Metric("step_time_seconds", "s", "Wall time of the newest step.", scope="run"),
    Metric("loss", "", "Loss of the newest step.", scope="run"),
    Metric("tokens_per_second_per_chip", "tokens/s", "Tokens per second and chip.", scope="run"),
    Metric("mfu", "share", "Model FLOPs over the peak of the chips.", scope="run"),
    Metric("tflops", "TFLOP/s", "Model TFLOP/s of all chips together.", scope="run"),
    Metric("samples_per_second", "", "Sequences per second of all chips together.", scope="run"),
    Metric("input_stall_seconds", "s", "Wait for the batch of the newest step.", scope="run"),
    Metric(
        "communication_overhead",
        "share",
        "Share of a step in which the chips wait for each other.",
        scope="run",
    ),
    Metric("goodput", "share", "Wall time spent in steps that count.", scope="run"),
)
RECORDED_AS = {
    "step": STEP,
    "loss": LOSS,
    "step_time_seconds": STEP_TIME,
    "tokens_per_second_per_chip": TOKENS_RATE,
    "mfu": MFU,
    "input_stall_seconds": INPUT_STALL,
}
"""The name of a metric in the records of metrics.jsonl, where a run records it."""
METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}


@dataclass(frozen=True, slots=True)
class Sample(Shown):
    """One number.

    Attributes:
        metric: A name of `METRICS`, or a name of Orbax or Grain.
        value: In the metric's unit; shares are 0 to 1. Always finite.
        chip: Index of the chip on its host; None for the host or the run.
        labels: Further labels: a quantile, a link, a buffer size.
    """

    metric: str
    value: float
    chip: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    def to_dict(self) -> JsonObject:
        """Return plain data without empty values."""
        shown: JsonObject = {"metric": self.metric, "value": self.value}
        if self.chip is not None:
            shown["chip"] = self.chip
        if self.labels:
            shown["labels"] = dict(self.labels)
        return shown

    @classmethod
    def from_dict(cls, data: JsonMapping) -> "Sample":
        """Read what `to_dict` wrote.

        Raises:
            KeyError, TypeError: It is something else.
        """
        metric, labels, chip = data["metric"], data.get("labels", {}), data.get("chip")
        counted = chip is None or (type(chip) is int and chip >= 0)
        if not isinstance(metric, str) or not isinstance(labels, Mapping) or not counted:
            raise TypeError(f"{data!r:.60} is no sample")
        return cls(metric, data["value"], chip, labels)


@dataclass(frozen=True, slots=True)
class Reading(Shown):
    """The numbers of one source at one time.

    Attributes:
        time: Unix seconds.
        host: Name of the machine.
        process: Index of the run's process on this machine.
        source: Name of the source: "libtpu grpc", "jax", "nvml", "psutil", "trainer", "prometheus"
            …
        samples: The numbers.
        missing: Metrics without a number, each with the reason. A missing metric is never reported
            as zero.
    """

    time: float
    host: str
    process: int
    source: str
    samples: tuple[Sample, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict[str, str])

    def values(self, metric: str) -> list[float]:
        """Return the values of a metric, chip by chip."""
        return [sample.value for sample in self.samples if sample.metric == metric]

    @classmethod
    def from_dict(cls, data: JsonMapping) -> "Reading":
        """Read what `to_dict` wrote.

        Raises:
            KeyError, TypeError: It is something else.
        """
        missing, process = data.get("missing", {}), data["process"]
        named = isinstance(data["source"], str) and isinstance(data["host"], str)
        if not named or type(process) is not int or not isinstance(missing, Mapping):
            raise TypeError(f"{data!r:.60} is no reading")
        return cls(
            time=data["time"],
            host=data["host"],
            process=process,
            source=data["source"],
            samples=tuple(Sample.from_dict(sample) for sample in data["samples"]),
            missing=missing,
        )


def parse_readings(lines: Sequence[bytes]) -> list[Reading]:
    """Return the readings in some JSON lines; lines that are damaged or not valid are skipped."""
    return [reading for record in parse_lines(lines) if record and (reading := _valid(record))]


def _valid(record: JsonMapping) -> Reading | None:
    try:
        reading = Reading.from_dict(record)
    except (KeyError, TypeError, AttributeError):
        return None
    is_valid = is_time(reading.time) and all(
        is_number(sample.value) and (sample.chip or 0) < MOST_CHIPS for sample in reading.samples
    )
    return reading if is_valid else None


class ReadingBuilder:
    """Builds a reading number by number.

    Args:
        source: Name of the source.
        wanted: Metrics of the source. Those without a number or reason are missing, with the reason
            given to `build`.
        process: Index of the process of the run.
    """

    def __init__(self, source: str, wanted: Iterable[str] = (), *, process: int = 0) -> None:
        self._source, self._process = source, process
        self._wanted = tuple(wanted)
        self._samples: list[Sample] = []
        self._missing: dict[str, str] = {}

    def add(
        self,
        metric: str,
        value: float,
        *,
        chip: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Add a number; a number that is not finite is recorded as missing."""
        if not math.isfinite(value):
            self.lack(metric, f"the source reported {value}")
            return
        self._samples.append(Sample(metric, float(value), chip, labels or {}))

    def lack(self, metric: str, reason: str) -> None:
        """Record why a metric is missing; the first reason is kept."""
        self._missing.setdefault(metric, reason)

    def build(
        self, *, otherwise: str = "the source did not report it", at: float | None = None
    ) -> Reading:
        """Return the reading, of now unless another time is given."""
        given = {sample.metric for sample in self._samples}
        for metric in self._wanted:
            if metric not in given:
                self.lack(metric, otherwise)
        return Reading(
            time=time.time() if at is None else at,
            host=HOST,
            process=self._process,
            source=self._source,
            samples=tuple(self._samples),
            missing={name: why for name, why in self._missing.items() if name not in given},
        )


MOST_CHIPS = 1 << 16  # per host
HOST = socket.gethostname()


@runtime_checkable
class Source(Protocol):
    """A source of numbers about chips, a host or a run.

    Attributes:
        name: The name in its readings: "libtpu grpc", "jax", "nvml" …
    """

    name: str

    def read(self) -> Reading:
        """Read the source now.

        A server that is gone, a driver that is not installed or a file that does not exist yet is
        no error: its metrics are missing, with the reason, and the next call tries again.
        """
        ...

    def close(self) -> None:
        """Close connections and files; may be called twice. By default there are none."""


@runtime_checkable
class Exporter(Protocol):
    """Receives every round of readings.

    Attributes:
        name: Its name in the log.
    """

    name: str

    def export(self, readings: Sequence[Reading]) -> None:
        """Export the readings of one round; the monitor logs an error once and continues."""
        ...

    def close(self) -> None:
        """Write waiting readings and close files."""
        ...
