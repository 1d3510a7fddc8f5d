"""A loopback server of libtpu's runtime metrics, from tpu-info's generated classes or from ours."""

from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc

from tpukit.observe.sources.libtpu_grpc import MESSAGES, SERVICE

Build = Callable[[str], Any]
MEMORY_TOTAL = "tpu.runtime.hbm.memory.total.bytes"
MEMORY_USED = "tpu.runtime.hbm.memory.usage.bytes"
DUTY_CYCLE = "tpu.runtime.tensorcore.dutycycle.percent"
BANDWIDTH = "tpu.runtime.hbm.utilization.percent"
IDLE = "tpu.runtime.tensorcore.idle_duration.seconds"
QUEUE = "hlo.queue.size.gauge"
TIMING = "hlo.execution.timing.distribution.microseconds"
DCN = "megascale.dcn_transfer_latencies.microsecond.cumulative.distribution"
SCALE, GROWTH = 1.0, 1.5


def generated(name: str) -> Any:
    """Return a message class that Google's compiler generated, as tpu-info ships it."""
    from tpu_info.proto import tpu_metric_service_pb2 as messages

    if name in ("Exponential", "BucketOptions"):
        outer = messages.Distribution.BucketOptions
        return outer if name == "BucketOptions" else outer.Exponential
    return getattr(messages, name)


@dataclass
class Chips:
    """What the server says; lists by device, buckets of latencies by buffer size."""

    used: list[float] = field(default_factory=lambda: [4 * 2**30, 5 * 2**30])
    total: list[float] = field(default_factory=lambda: [32 * 2**30, 32 * 2**30])
    duty: list[float] = field(default_factory=lambda: [97.5, 41.0])
    bandwidth: list[float] = field(default_factory=lambda: [60.0, 20.0])
    idle: list[float] = field(default_factory=lambda: [0.0, 3.5])
    queue: list[int] = field(default_factory=lambda: [2, 0])
    first_device: int = 0
    latencies: dict[str, list[int]] = field(default_factory=lambda: {"8MB+": [0, 3, 10, 4, 0, 1]})
    supported: tuple[str, ...] = (
        *(MEMORY_TOTAL, MEMORY_USED, DUTY_CYCLE, BANDWIDTH, IDLE, QUEUE, TIMING, DCN),
    )

    def answer(self, name: str, build: Build) -> Any:
        """Return the response to a request for a metric."""
        gauges: dict[str, tuple[str, list[Any]]] = {
            MEMORY_TOTAL: ("as_int", [int(one) for one in self.total]),
            MEMORY_USED: ("as_int", [int(one) for one in self.used]),
            DUTY_CYCLE: ("as_double", self.duty),
            BANDWIDTH: ("as_double", self.bandwidth),
            IDLE: ("as_double", self.idle),
        }
        metrics: list[Any] = []
        if name in gauges:
            kind, values = gauges[name]
            metrics = [
                _metric(
                    build,
                    build("AttrValue")(int_attr=self.first_device + index),
                    gauge=build("Gauge")(**{kind: value}),
                )
                for index, value in enumerate(values)
            ]
        elif name == QUEUE:
            metrics = [
                _metric(build, _ordinal(build, index), gauge=build("Gauge")(as_int=size))
                for index, size in enumerate(self.queue)
            ]
        elif name == TIMING:
            metrics = [
                _metric(build, _ordinal(build, index), distribution=_buckets(build, [0, 5, 5]))
                for index in range(len(self.queue))
            ]
        elif name == DCN:
            metrics = [
                _metric(
                    build,
                    _attributes(build, {"buffer-size": size}),
                    distribution=_buckets(build, counts),
                )
                for size, counts in self.latencies.items()
            ]
        return build("MetricResponse")(metric=build("TPUMetric")(name=name, metrics=metrics))


class LibtpuServer:
    """Serves `Chips` on loopback; `stop` and `start` keep the port."""

    def __init__(self, chips: Chips | None = None, *, build: Build = generated) -> None:
        self.chips, self._build = chips or Chips(), build
        self.asked: list[str] = []
        self.port = 0
        self._server: Any = None
        self.start()

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    def start(self) -> None:
        self._server = grpc.server(
            futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)]
        )
        handler = grpc.unary_unary_rpc_method_handler(
            self._get,
            request_deserializer=self._build("MetricRequest").FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"GetRuntimeMetric": handler}),)
        )
        credentials = grpc.local_server_credentials()
        self.port = self._server.add_secure_port(f"localhost:{self.port}", credentials)
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def _get(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.asked.append(request.metric_name)
        if request.metric_name not in self.chips.supported:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no metric {request.metric_name}")
        return self.chips.answer(request.metric_name, self._build)


def _metric(build: Build, value: Any, **measure: Any) -> Any:
    attribute = build("Attribute")(key="device-id", value=value)
    return build("Metric")(attribute=attribute, **measure)


def _ordinal(build: Build, device: int) -> Any:
    return _attributes(build, {"device_ordinal": str(device), "core_type": "tensorcore"})


def _attributes(build: Build, values: dict[str, str]) -> Any:
    listed = [
        build("Attribute")(key=key, value=build("AttrValue")(string_attr=value))
        for key, value in values.items()
    ]
    return build("AttrValue")(kvlist_attr=build("KeyValueList")(attributes=listed))


def _buckets(build: Build, counts: list[int]) -> Any:
    exponential = build("Exponential")(
        num_finite_buckets=len(counts) - 2, growth_factor=GROWTH, scale=SCALE
    )
    return build("Distribution")(
        count=sum(counts),
        bucket_options=build("BucketOptions")(exponential_buckets=exponential),
        bucket_counts=counts,
    )


ours = MESSAGES.__getitem__
