"""Every metric by its name: unit, meaning, and what libtpu and GKE call it.

Shares are 0 to 1 here; libtpu and GKE say percent, and sources and exporters convert.
"""

from dataclasses import dataclass
from typing import Literal

Scope = Literal["chip", "host", "run"]
Unit = Literal["share", "B", "B/s", "s", "W", "°C", "TFLOP/s", "tokens/s", ""]


@dataclass(frozen=True, slots=True)
class Metric:
    """What one metric means.

    Attributes:
        name: Ours, in samples, alerts and files.
        unit: Of its value.
        meaning: One sentence.
        scope: What has one of it: each chip, each host, or the run.
        libtpu_name: The runtime's own name, where it has one.
        gke_name: What GKE's exporter calls it; "" where GKE has none.
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
        "Time during which the chip was processing anything at all; not how well it was used.",
        libtpu_name="tpu.runtime.tensorcore.dutycycle.percent",
        gke_name="duty_cycle",
    ),
    Metric(
        "tensorcore_utilization",
        "share",
        "Operations of the TensorCore over the most it can do.",
        libtpu_name="tensorcore_util",
        gke_name="tensorcore_utilization",
    ),
    Metric(
        "memory_bandwidth_utilization",
        "share",
        "Bytes moved to and from HBM over the most that can be moved.",
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
        "Programs that wait for the chip; 0 for long means that the host is too slow.",
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
        "How long the TensorCore has had nothing to do.",
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
        "Time of a transfer from another slice as its receiver sees it, by quantile.",
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
    Metric("tokens_per_second_per_chip", "tokens/s", "Tokens a chip gets through.", scope="run"),
    Metric("mfu", "share", "Model FLOPs over the peak of the chips.", scope="run"),
    Metric("tflops", "TFLOP/s", "Model FLOPs a second of all chips together.", scope="run"),
    Metric("samples_per_second", "", "Sequences a second of all chips together.", scope="run"),
    Metric("input_stall_seconds", "s", "Wait for the batch of the newest step.", scope="run"),
    Metric(
        "communication_overhead",
        "share",
        "Share of a step in which the chips wait for each other.",
        scope="run",
    ),
    Metric("goodput", "share", "Wall time spent in steps that count.", scope="run"),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}
