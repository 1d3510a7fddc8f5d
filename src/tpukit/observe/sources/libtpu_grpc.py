"""libtpu's runtime metrics, from the process on this host that has the chips open.

libtpu serves `tpu.monitoring.runtime.RuntimeMetricService` from that process. tpu-info has the
generated messages; `message_classes` tells why an excerpt of their schema is used instead.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ...runtime.protobuf_messages import message_classes
from ..readings import METRICS, Metric, Reading, ReadingBuilder

PACKAGE = "tpu.monitoring.runtime"
SERVICE = f"{PACKAGE}.RuntimeMetricService"
MESSAGES = message_classes(
    PACKAGE,
    """
    message Exponential {
      int32 num_finite_buckets = 1; double growth_factor = 2; double scale = 3;
    }
    message BucketOptions { oneof options { Exponential exponential_buckets = 2; } }
    message Distribution {
      int64 count = 1; double mean = 2; double min = 3; double max = 4;
      BucketOptions bucket_options = 6; repeated int64 bucket_counts = 7;
    }
    message Gauge {
      oneof value {
        double as_double = 1; int64 as_int = 2; string as_string = 3; bool as_bool = 4;
      }
    }
    message AttrValue {
      oneof attr { string string_attr = 1; int64 int_attr = 3; KeyValueList kvlist_attr = 6; }
    }
    message KeyValueList { repeated Attribute attributes = 1; }
    message Attribute { string key = 1; AttrValue value = 2; }
    message Metric {
      Attribute attribute = 1; oneof measure { Gauge gauge = 3; Distribution distribution = 5; }
    }
    message TPUMetric { string name = 1; string description = 2; repeated Metric metrics = 3; }
    message MetricRequest { string metric_name = 1; bool skip_node_aggregation = 2; }
    message MetricResponse { TPUMetric metric = 1; }
    """,
)
QUANTILES = (0.5, 0.9, 0.95, 0.999)


@dataclass(frozen=True, slots=True)
class Buckets:
    """Counts by exponential bucket.

    Bucket 0 ends at `scale`; bucket i begins at scale · growth^(i-1).
    """

    counts: tuple[int, ...]
    scale: float
    growth: float

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def __add__(self, other: "Buckets") -> "Buckets":
        pairs = itertools.zip_longest(self.counts, other.counts, fillvalue=0)
        return Buckets(tuple(a + b for a, b in pairs), self.scale, self.growth)

    def quantile(self, share: float) -> float:
        """Return the value below which `share` of all values are, interpolated in its bucket.

        Raises:
            ValueError: There are no values.
        """
        wanted = int(self.count * share)
        below = 0
        for index, count in enumerate(self.counts):
            if count and below + count > wanted:
                begin = 0.0 if index == 0 else self.scale * self.growth ** (index - 1)
                end = self.scale * self.growth**index
                return begin + (end - begin) * (wanted - below) / count
            below += count
        raise ValueError("a distribution without values has no quantiles")


def quantiles_of(buckets: Buckets, quantiles: Sequence[float] = QUANTILES) -> Mapping[str, float]:
    """Return the quantiles by their names, such as "0.5"; empty where there are no values."""
    if not buckets.count:
        return {}
    return {f"{share:g}": buckets.quantile(share) for share in quantiles}


# Device, other labels, value.
Row: TypeAlias = tuple[int | None, dict[str, str], float]
ADDRESS = "localhost:8431"
TIMEOUT_S = 2.0
# By libtpu's name; metrics with a short name are served by the SDK only.
SERVED = {metric.libtpu_name: metric for metric in METRICS.values() if "." in metric.libtpu_name}
PER_CORE = ("memory_used", "memory_total")
# How old a repeated answer may be. Each query wakes gRPC threads and costs about 1 ms of CPU time.
# Metrics that are not listed change slowly or are cumulative.
OLDEST_S = {"duty_cycle": 0.0, "memory_used": 5.0, "memory_bandwidth_utilization": 5.0}
SELDOM_S = 10.0
# Reconnect to a restarted server at the next reading; gRPC's default waits up to 2 minutes.
OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True)
class _Kept:
    """libtpu's last answer about one metric: rows, or the refusal."""

    at: float
    rows: list[Row] = field(default_factory=list[Row])
    refusal: str = ""


class LibtpuSource:
    """Reads `RuntimeMetricService`, keeping one connection open.

    Args:
        address: libtpu's address, which is always on loopback.
        timeout_s: Seconds for all answers of a reading.
        seldom_s: How old an answer about a slowly changing metric may be.
        process: Index of the process of the run.
        clock: A monotonic clock in seconds.
    """

    name = "libtpu grpc"

    def __init__(
        self,
        address: str = ADDRESS,
        *,
        timeout_s: float = TIMEOUT_S,
        seldom_s: float = SELDOM_S,
        process: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address, self._timeout_s, self._process = address, timeout_s, process
        self._seldom_s, self._clock = seldom_s, clock
        self._kept: dict[str, _Kept] = {}
        self._channel: Any = None
        self._call: Any = None

    def read(self) -> Reading:
        """Query the metrics that are due; others repeat their last answer."""
        names = [metric.name for metric in SERVED.values()]
        builder = ReadingBuilder(self.name, names, process=self._process)
        try:
            import grpc
        except ImportError:
            return builder.build(otherwise="needs 'grpcio': pip install 'tpukit[monitor]'")
        now = self._clock()
        self._kept = {
            name: kept for name, kept in self._kept.items() if not self._is_due(name, kept, now)
        }
        otherwise = ""
        # One after the other, because parallel queries cost more CPU time in gRPC threads.
        for name in [name for name in SERVED if name not in self._kept]:
            left = max(0.0, now + self._timeout_s - self._clock())
            try:
                self._kept[name] = _Kept(now, rows=self._ask(name, left))
            except grpc.RpcError as error:
                code: Any = error.code()  # pyright: ignore[reportAttributeAccessIssue]  of any call
                if code == grpc.StatusCode.UNAVAILABLE:
                    # After a restart it may be another libtpu, so the kept answers are dropped.
                    self._kept.clear()
                elif code != grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._kept[name] = _Kept(now, refusal=self._reason(error))
                    continue
                otherwise = self._reason(error)
                break
        for name, kept in self._kept.items():
            if kept.refusal:
                builder.lack(SERVED[name].name, kept.refusal)
        add_rows(
            builder,
            {SERVED[name].name: kept.rows for name, kept in self._kept.items() if not kept.refusal},
        )
        return builder.build(
            otherwise=otherwise or f"the libtpu at {self.address} has no values now"
        )

    def _is_due(self, name: str, kept: "_Kept", now: float) -> bool:
        oldest_s = OLDEST_S.get(SERVED[name].name, self._seldom_s)
        return now - kept.at >= (self._seldom_s if kept.refusal else oldest_s)

    def _ask(self, name: str, timeout_s: float) -> list[Row]:
        if self._call is None:
            import grpc

            self._channel = grpc.secure_channel(
                self.address, grpc.local_channel_credentials(), options=OPTIONS
            )
            self._call = self._channel.unary_unary(
                f"/{SERVICE}/GetRuntimeMetric",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=MESSAGES["MetricResponse"].FromString,
            )
        answer = self._call(MESSAGES["MetricRequest"](metric_name=name), timeout=timeout_s)
        return rows_of(SERVED[name], answer.metric.metrics)

    def close(self) -> None:
        """Close the connection."""
        channel, self._channel, self._call = self._channel, None, None
        self._kept.clear()
        if channel is not None:
            channel.close()

    def _reason(self, error: Any) -> str:
        import grpc

        if error.code() == grpc.StatusCode.UNAVAILABLE:
            return (
                f"no libtpu serves metrics at {self.address}: it serves them while a "
                "process of this host has the chips open"
            )
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"the libtpu at {self.address} did not answer within {self._timeout_s:g} s"
        return f"the libtpu at {self.address} refused: {error.details() or error.code().name}"


def rows_of(metric: Metric, answers: Iterable[Any]) -> list[Row]:
    """Return libtpu's answers about a metric as rows in the metric's unit."""
    if is_distribution(metric):
        return _quantile_rows(answers)
    scale = 0.01 if metric.unit == "share" else 1.0
    return [(*_device(answer), _gauge(answer) * scale) for answer in answers]


def add_rows(builder: ReadingBuilder, rows: Mapping[str, list[Row]]) -> None:
    """Add rows by metric, devices numbered from 0 on each host.

    Chips with two cores (v2, v3, 7x) report memory per core and the duty cycle per chip, so the
    memory of both cores is added up.
    """
    chips = len({device for device, _, _ in rows.get("duty_cycle", [])})
    for metric, of_metric in rows.items():
        if not of_metric and is_distribution(METRICS[metric]):
            builder.lack(metric, "no such event has happened yet")
        devices = sorted({device for device, _, _ in of_metric if device is not None})
        index = {device: number for number, device in enumerate(devices)}
        if metric in PER_CORE and chips and len(devices) == 2 * chips:
            summed = [0.0] * chips
            for device, _, value in of_metric:
                summed[index[device or 0] // 2] += value
            for chip, value in enumerate(summed):
                builder.add(metric, value, chip=chip)
            continue
        for device, labels, value in of_metric:
            chip = None if device is None else index[device]
            builder.add(metric, value, chip=chip, labels=labels)


def is_distribution(metric: Metric) -> bool:
    """Return whether libtpu reports the metric as a histogram."""
    return "distribution" in metric.libtpu_name


def _quantile_rows(answers: Iterable[Any]) -> list[Row]:
    """Return quantiles in seconds, one row per quantile and buffer size, over all cores."""
    summed: dict[tuple[int | None, str], Buckets] = {}
    for answer in answers:
        options = answer.distribution.bucket_options.exponential_buckets
        counts = tuple(answer.distribution.bucket_counts)
        buckets = Buckets(counts, options.scale, options.growth_factor)
        attributes = {
            item.key: item.value for item in answer.attribute.value.kvlist_attr.attributes
        }
        device = _device(answer)[0] if "device_ordinal" in attributes else None
        size = attributes["buffer-size"].string_attr if "buffer-size" in attributes else ""
        before = summed.get((device, size))
        summed[device, size] = buckets if before is None else before + buckets
    return [
        (device, {"quantile": name} | ({"buffer_size": size} if size else {}), value / 1e6)
        for (device, size), buckets in summed.items()
        for name, value in quantiles_of(buckets).items()
    ]


def _device(metric: Any) -> tuple[int, dict[str, str]]:
    """Return a metric's device and its other labels."""
    value = metric.attribute.value
    if value.WhichOneof("attr") != "kvlist_attr":
        return int(value.int_attr), {}
    device, labels = 0, dict[str, str]()
    for item in value.kvlist_attr.attributes:
        kind = item.value.WhichOneof("attr")
        text = str(getattr(item.value, kind)) if kind else ""
        if item.key == "device_ordinal":
            device = int(text) if text.isdigit() else 0
        elif text:
            labels[item.key.replace("-", "_")] = text
    return device, labels


def _gauge(metric: Any) -> float:
    kind = metric.gauge.WhichOneof("value")
    try:
        return float(getattr(metric.gauge, kind)) if kind else float("nan")
    except ValueError:  # text instead of a number
        return float("nan")
