"""Readings as time series in Cloud Monitoring, written by Google's client."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from ...errors import ConfigError, MissingExtraError, ProviderError, TPUValidationError
from ..readings import METRICS, Reading, Sample

ENDPOINT = "https://monitoring.googleapis.com"
TYPE_PREFIX = "custom.googleapis.com/tpukit/"
# Limits of timeSeries.create: series per call, and seconds between two points of a series.
MOST_SERIES, LEAST_PERIOD_S = 200, 5.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")
TIMEOUT_S = 10.0


class CloudMonitoringExporter:
    """Writes `custom.googleapis.com/tpukit/<metric>` gauges on a `generic_task` resource.

    Args:
        project: The Google Cloud project; the credentials' project by default.
        endpoint: Address of the service. An address on this machine is used without encryption.
        location: The resource's zone or region.
        job: The resource's job label, such as the run's name.
        every_s: Seconds between two writes; readings in between are not written.
        credentials_file: A service account's key; the environment's by default.
        clock: A monotonic clock in seconds.

    Raises:
        MissingExtraError: google-cloud-monitoring is not installed.
        ProviderError: There are no credentials.
        ConfigError: Nothing names a project.
    """

    name = "cloud monitoring"

    def __init__(
        self,
        project: str | None = None,
        *,
        endpoint: str = ENDPOINT,
        location: str = "global",
        job: str = "tpukit",
        every_s: float = 60.0,
        credentials_file: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every_s < LEAST_PERIOD_S:
            raise TPUValidationError(
                f"every_s={every_s:g}: Cloud Monitoring takes a point of a series every "
                f"{LEAST_PERIOD_S:g} s at most; give {LEAST_PERIOD_S:g} or more."
            )
        self._client, named = _connect(endpoint, credentials_file)
        self.project = project or named
        if not self.project:
            raise ConfigError("No Google Cloud project is known; give project=….")
        self._location, self._job = location, job
        self._every_s, self._clock = every_s, clock
        self._written_at: float | None = None
        self._newest: dict[tuple[object, ...], int] = {}

    def export(self, readings: Sequence[Reading]) -> None:
        """Write the readings if `every_s` has passed.

        Raises:
            ProviderError: The service refused, or could not be reached.
        """
        now = self._clock()
        if self._written_at is not None and now - self._written_at < self._every_s:
            return
        self._written_at = now
        self.write(readings)

    def write(self, readings: Sequence[Reading]) -> int:
        """Write the readings now; return the number of time series.

        Raises:
            ProviderError: The service refused, or could not be reached.
        """
        from google.api_core.exceptions import GoogleAPIError

        series = [*self._series(readings)]
        for begin in range(0, len(series), MOST_SERIES):
            try:
                self._client.create_time_series(
                    name=f"projects/{self.project}",
                    time_series=series[begin : begin + MOST_SERIES],
                    timeout=TIMEOUT_S,
                )
            except GoogleAPIError as error:
                message = getattr(error, "message", None) or str(error)
                raise ProviderError(f"Cloud Monitoring refused the metrics: {message}") from error
        return len(series)

    def close(self) -> None:
        """Close the connection."""
        self._client.transport.close()

    def _series(self, readings: Iterable[Reading]) -> Iterator[Any]:
        from google.cloud import monitoring_v3

        for reading in readings:
            seconds = int(reading.time)
            interval = {"end_time": {"seconds": seconds}}
            for sample in reading.samples:
                labels = _labels(sample)
                # A series accepts only newer points, one per call. Two sources may have the same
                # metric, and the trainer's newest step may already be written.
                key = (sample.metric, reading.host, reading.process, *sorted(labels.items()))
                if self._newest.get(key, -1) >= seconds:
                    continue
                self._newest[key] = seconds
                yield monitoring_v3.TimeSeries(
                    metric={"type": TYPE_PREFIX + sample.metric, "labels": labels},
                    resource={
                        "type": "generic_task",
                        "labels": {
                            "project_id": self.project,
                            "location": self._location,
                            "namespace": reading.host,
                            "job": self._job,
                            "task_id": str(reading.process),
                        },
                    },
                    metric_kind="GAUGE",
                    value_type="DOUBLE",
                    unit=_UNITS.get(METRICS[sample.metric].unit, "1")
                    if sample.metric in METRICS
                    else "1",
                    points=[{"interval": interval, "value": {"double_value": sample.value}}],
                )


_UNITS = {"B": "By", "s": "s", "W": "W", "B/s": "By/s"}


def _labels(sample: Sample) -> dict[str, str]:
    chip = {} if sample.chip is None else {"chip": str(sample.chip)}
    return chip | dict(sample.labels)


def _connect(endpoint: str, credentials_file: str | None) -> tuple[Any, str | None]:
    """Return a client and its credentials' project."""
    try:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import monitoring_v3
        from google.cloud.monitoring_v3.services.metric_service import transports
    except ImportError:
        raise MissingExtraError(
            "gcp", needed_for="the Cloud Monitoring exporter", module="google-cloud-monitoring"
        ) from None
    parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
    host = parts.hostname or ""
    if parts.scheme == "http":
        if host not in LOOPBACK:
            raise TPUValidationError(
                f"{endpoint} would send metrics unencrypted; give https:// for another machine."
            )
        import grpc

        channel = grpc.insecure_channel(
            f"{host}:{parts.port or 80}", options=[("grpc.enable_http_proxy", 0)]
        )
        transport = transports.MetricServiceGrpcTransport(
            channel=channel, credentials=AnonymousCredentials()
        )
        return monitoring_v3.MetricServiceClient(transport=transport), None
    from ...runtime.google_credentials import find_identity

    identity = find_identity(credentials_file)
    client = monitoring_v3.MetricServiceClient(
        credentials=identity.credentials,
        client_options={"api_endpoint": f"{host}:{parts.port or 443}"},
    )
    return client, identity.project
