"""libtpu's runtime metrics, from the process on this host that holds the chips."""

from collections.abc import Iterable
from typing import Any

from ..readings import METRICS, Reading, ReadingBuilder
from .distributions import Buckets, quantiles_of
from .libtpu_messages import SERVICE, message_class

ADDRESS = "localhost:8431"
TIMEOUT_S = 2.0
# By libtpu's name; those with a short name are the SDK's, which serves them by other means.
SERVED = {one.libtpu_name: one for one in METRICS.values() if "." in one.libtpu_name}
PER_CORE = ("memory_used", "memory_total")
# A server that is back should be seen at the next reading: gRPC itself would wait up to 2 minutes.
OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
)


class LibtpuSource:
    """Reads `RuntimeMetricService`, keeping one connection open.

    Args:
        address: Where libtpu serves; it does so on loopback only.
        timeout_s: For all answers of a reading together.
        process: Index of the process of the run.
    """

    name = "libtpu grpc"

    def __init__(
        self, address: str = ADDRESS, *, timeout_s: float = TIMEOUT_S, process: int = 0
    ) -> None:
        self.address, self._timeout_s, self._process = address, timeout_s, process
        self._channel: Any = None
        self._calls: dict[str, Any] = {}
        self._supported: frozenset[str] | None = None

    def read(self) -> Reading:
        """Ask for every metric that this libtpu supports, all at once."""
        found = ReadingBuilder(
            self.name, [one.name for one in SERVED.values()], process=self._process
        )
        try:
            import grpc
        except ImportError:
            return found.build(otherwise="needs 'grpcio': pip install 'tpukit[monitor]'")
        try:
            supported = self._list_supported()
        except grpc.RpcError as error:
            return found.build(otherwise=self._reason(error))
        calls = {
            name: self._call("GetRuntimeMetric", "MetricResponse").future(
                message_class("MetricRequest")(metric_name=name), timeout=self._timeout_s
            )
            for name in SERVED
            if name in supported
        }
        answers: dict[str, Any] = {}
        for name, call in calls.items():
            try:
                answers[name] = call.result().metric.metrics
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNAVAILABLE:
                    self._supported = None  # what comes back may be another libtpu
                found.lack(SERVED[name].name, self._reason(error))
        add_answers(found, answers)
        return found.build(otherwise=f"the libtpu at {self.address} does not offer it now")

    def close(self) -> None:
        """Close the connection."""
        channel, self._channel, self._supported = self._channel, None, None
        self._calls.clear()
        if channel is not None:
            channel.close()

    def _call(self, method: str, answer: str) -> Any:
        if self._channel is None:
            import grpc

            self._channel = grpc.secure_channel(
                self.address, grpc.local_channel_credentials(), options=OPTIONS
            )
        if method not in self._calls:
            self._calls[method] = self._channel.unary_unary(
                f"/{SERVICE}/{method}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=message_class(answer).FromString,
            )
        return self._calls[method]

    def _list_supported(self) -> frozenset[str]:
        if self._supported is None:
            answer = self._call("ListSupportedMetrics", "ListSupportedMetricsResponse")(
                message_class("ListSupportedMetricsRequest")(), timeout=self._timeout_s
            )
            self._supported = frozenset(one.metric_name for one in answer.supported_metric)
        return self._supported

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


def add_answers(found: ReadingBuilder, answers: dict[str, Iterable[Any]]) -> None:
    """Add what libtpu answered, by its name of the metric.

    Devices are numbered from 0 on each host. Chips of two cores (v2, v3, 7x) count memory by core
    and the duty cycle by chip: then the memory of the two cores is one chip's.
    """
    gauges: dict[str, list[tuple[int, dict[str, str], float]]] = {}
    for name, metrics in answers.items():
        metric = SERVED[name]
        if metric.scope == "host" or metric.name == "hlo_execution_seconds":
            _add_distributions(found, metric.name, metrics)
            continue
        scale = 0.01 if metric.unit == "share" else 1.0
        gauges[metric.name] = [(*_device(one), _gauge(one) * scale) for one in metrics]
    chips = len({device for device, _, _ in gauges.get("duty_cycle", [])})
    for metric, rows in gauges.items():
        order = sorted({device for device, _, _ in rows})
        if metric in PER_CORE and chips and len(order) == 2 * chips:
            for chip in range(chips):
                cores = order[2 * chip : 2 * chip + 2]
                found.add(metric, sum(v for core, _, v in rows if core in cores), chip=chip)
            continue
        for device, labels, value in sorted(rows, key=lambda row: row[0]):
            found.add(metric, value, chip=order.index(device), labels=labels)


def _add_distributions(found: ReadingBuilder, metric: str, metrics: Iterable[Any]) -> None:
    """Add quantiles in seconds; those of one buffer size, over all cores, are one distribution."""
    by_labels: dict[tuple[int | None, str], Buckets] = {}
    for one in metrics:
        options = one.distribution.bucket_options.exponential_buckets
        buckets = Buckets(
            tuple(one.distribution.bucket_counts), options.scale, options.growth_factor
        )
        attributes = {item.key: item.value for item in one.attribute.value.kvlist_attr.attributes}
        chip: int | None = None
        if "device_ordinal" in attributes:
            chip, _ = _device(one)
        size = attributes["buffer-size"].string_attr if "buffer-size" in attributes else ""
        before = by_labels.get((chip, size))
        by_labels[chip, size] = buckets if before is None else before + buckets
    for (chip, size), buckets in by_labels.items():
        for quantile, value in quantiles_of(buckets).items():
            labels = {"quantile": quantile} | ({"buffer_size": size} if size else {})
            found.add(metric, value / 1e6, chip=chip, labels=labels)
    if not any(buckets.count for buckets in by_labels.values()):
        found.lack(metric, "nothing of the kind has happened yet")


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
