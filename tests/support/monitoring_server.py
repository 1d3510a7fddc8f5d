"""Cloud Monitoring on loopback, for Google's own client."""

from concurrent import futures

import grpc
from google.cloud.monitoring_v3.types import metric_service
from google.protobuf.empty_pb2 import Empty


class Monitoring:
    """Cloud Monitoring's `CreateTimeSeries` on loopback, with the service's limits."""

    def __init__(self):
        self.calls = []
        self.last = {}
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        handler = grpc.unary_unary_rpc_method_handler(
            self._create,
            request_deserializer=metric_service.CreateTimeSeriesRequest.deserialize,
            response_serializer=lambda message: message.SerializeToString(),
        )
        service = "google.monitoring.v3.MetricService"
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {"CreateTimeSeries": handler}),)
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"

    def stop(self):
        self._server.stop(None).wait()

    def _create(self, request, context):
        def refuse(why):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)

        if len(request.time_series) > 200:
            refuse(f"{len(request.time_series)} time series; at most 200 a request")
        keys = set()
        for series in request.time_series:
            key = (
                series.metric.type,
                frozenset(series.metric.labels.items()),
                frozenset(series.resource.labels.items()),
            )
            if key in keys:
                refuse(f"{series.metric.type} twice in one request")
            keys.add(key)
            if len(series.points) != 1:
                refuse("exactly one point a series")
            end = series.points[0].interval.end_time.timestamp()
            if end <= self.last.get(key, 0.0):
                refuse("points must be written in order")
            self.last[key] = end
        self.calls.append(request)
        return Empty()
