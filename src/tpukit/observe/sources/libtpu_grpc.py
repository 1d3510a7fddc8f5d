"""libtpu's runtime metrics, from the process on this host that holds the chips."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..readings import METRICS, Metric, Reading, ReadingBuilder
from .distributions import Buckets, quantiles_of
from .libtpu_messages import SERVICE, message_class

# Device, what else tells it from its neighbours, value.
Row: TypeAlias = tuple[int | None, dict[str, str], float]
ADDRESS = "localhost:8431"
TIMEOUT_S = 2.0
# By libtpu's name; those with a short name are the SDK's, which serves them by other means.
SERVED = {one.libtpu_name: one for one in METRICS.values() if "." in one.libtpu_name}
PER_CORE = ("memory_used", "memory_total")
# How old an answer may be when it is told again, because each question wakes threads of gRPC's and
# costs about 1 ms of CPU time. What is not listed hardly changes, or sums up all that happened.
OLDEST_S = {"duty_cycle": 0.0, "memory_used": 5.0, "memory_bandwidth_utilization": 5.0}
SELDOM_S = 10.0
# A server that is back should be seen at the next reading: gRPC itself would wait up to 2 minutes.
OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What libtpu answered about one metric, and when: rows, or why not."""

    at: float
    rows: list[Row] = field(default_factory=list[Row])
    refusal: str = ""


class LibtpuSource:
    """Reads `RuntimeMetricService`, keeping one connection open.

    Args:
        address: Where libtpu serves; it does so on loopback only.
        timeout_s: For all answers of a reading together.
        seldom_s: How old an answer about what changes slowly may be.
        process: Index of the process of the run.
        clock: Seconds that only go forward.
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
        """Ask for what is due; what was asked for a moment ago and changes slowly is told again."""
        wanted = [metric.name for metric in SERVED.values()]
        found = ReadingBuilder(self.name, wanted, process=self._process)
        try:
            import grpc
        except ImportError:
            return found.build(otherwise="needs 'grpcio': pip install 'tpukit[monitor]'")
        now = self._clock()
        self._kept = {
            name: kept for name, kept in self._kept.items() if not self._is_due(name, kept, now)
        }
        otherwise = ""
        # One after the other: in parallel they cost more CPU time, in threads of gRPC's.
        for name in [name for name in SERVED if name not in self._kept]:
            left = max(0.0, now + self._timeout_s - self._clock())
            try:
                self._kept[name] = _Kept(now, rows=self._ask(name, left))
            except grpc.RpcError as error:
                code: Any = error.code()  # pyright: ignore[reportAttributeAccessIssue]  of any call
                if code == grpc.StatusCode.UNAVAILABLE:
                    # What comes back may be another libtpu, and what is kept is of this one.
                    self._kept.clear()
                elif code != grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._kept[name] = _Kept(now, refusal=self._reason(error))
                    continue
                otherwise = self._reason(error)
                break
        for name, kept in self._kept.items():
            if kept.refusal:
                found.lack(SERVED[name].name, kept.refusal)
        add_rows(
            found,
            {SERVED[name].name: kept.rows for name, kept in self._kept.items() if not kept.refusal},
        )
        return found.build(otherwise=otherwise or f"the libtpu at {self.address} has none now")

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
                response_deserializer=message_class("MetricResponse").FromString,
            )
        answer = self._call(message_class("MetricRequest")(metric_name=name), timeout=timeout_s)
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
                f"no libtpu serves metrics at {self.address}: it does while a process of this "
                "host holds the chips"
            )
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"the libtpu at {self.address} did not answer within {self._timeout_s:g} s"
        return f"the libtpu at {self.address} refused: {error.details() or error.code().name}"


def rows_of(metric: Metric, answers: Iterable[Any]) -> list[Row]:
    """Turn libtpu's answers about a metric into rows of our units."""
    if is_distribution(metric):
        return _quantile_rows(answers)
    scale = 0.01 if metric.unit == "share" else 1.0
    return [(*_device(one), _gauge(one) * scale) for one in answers]


def add_rows(found: ReadingBuilder, rows: Mapping[str, list[Row]]) -> None:
    """Add rows by metric, devices numbered from 0 on each host.

    Chips of two cores (v2, v3, 7x) count memory by core and the duty cycle by chip: then the memory
    of the two cores is one chip's.
    """
    chips = len({device for device, _, _ in rows.get("duty_cycle", [])})
    for metric, of_metric in rows.items():
        if not of_metric and is_distribution(METRICS[metric]):
            found.lack(metric, "nothing of the kind has happened yet")
        devices = sorted({device for device, _, _ in of_metric if device is not None})
        index = {device: number for number, device in enumerate(devices)}
        if metric in PER_CORE and chips and len(devices) == 2 * chips:
            summed = [0.0] * chips
            for device, _, value in of_metric:
                summed[index[device or 0] // 2] += value
            for chip, value in enumerate(summed):
                found.add(metric, value, chip=chip)
            continue
        for device, labels, value in of_metric:
            chip = None if device is None else index[device]
            found.add(metric, value, chip=chip, labels=labels)


def is_distribution(metric: Metric) -> bool:
    """Whether libtpu keeps the metric as counts by bucket."""
    return "distribution" in metric.libtpu_name


def _quantile_rows(answers: Iterable[Any]) -> list[Row]:
    """Return quantiles in seconds; those of one buffer size, over all cores, are one row each."""
    summed: dict[tuple[int | None, str], Buckets] = {}
    for one in answers:
        options = one.distribution.bucket_options.exponential_buckets
        counts = tuple(one.distribution.bucket_counts)
        buckets = Buckets(counts, options.scale, options.growth_factor)
        attributes = {item.key: item.value for item in one.attribute.value.kvlist_attr.attributes}
        device = _device(one)[0] if "device_ordinal" in attributes else None
        size = attributes["buffer-size"].string_attr if "buffer-size" in attributes else ""
        before = summed.get((device, size))
        summed[device, size] = buckets if before is None else before + buckets
    return [
        (device, {"quantile": name} | ({"buffer_size": size} if size else {}), value / 1e6)
        for (device, size), buckets in summed.items()
        for name, value in quantiles_of(buckets).items()
    ]


def _device(metric: Any) -> tuple[int, dict[str, str]]:
    """Return the device a metric is of, and what else tells it from others of that device."""
    value = metric.attribute.value
    if value.WhichOneof("attr") != "kvlist_attr":
        return int(value.int_attr), {}
    device, labels = 0, dict[str, str]()
    for item in value.kvlist_attr.attributes:
        kind = item.value.WhichOneof("attr")
        said = str(getattr(item.value, kind)) if kind else ""
        if item.key == "device_ordinal":
            device = int(said) if said.isdigit() else 0
        elif said:
            labels[item.key.replace("-", "_")] = said
    return device, labels


def _gauge(metric: Any) -> float:
    kind = metric.gauge.WhichOneof("value")
    try:
        return float(getattr(metric.gauge, kind)) if kind else float("nan")
    except ValueError:  # a word instead of a number
        return float("nan")
