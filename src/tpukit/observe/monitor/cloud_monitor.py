"""`TpuMonitor` of document 004: metrics of this host, reported to Cloud Monitoring."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Self

from ...errors import ConfigError, ProviderError
from ...job.sections import PROVIDER_VARIABLE
from ...runtime.calls import either_way
from ..exporters.cloud_monitoring import ENDPOINT, CloudMonitoringExporter
from ..readings import Source
from .collector import MetricsCollector
from .current import CurrentMetrics
from .monitor import Startable, TPUMonitor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TpuMonitor(Startable):
    """Collects metrics on request or at even intervals, for Cloud Monitoring.

    ```python
    monitor = TpuMonitor().with_collection_interval(30).with_project("p").build()
    metrics = monitor.collect_metrics()  # awaited, in a coroutine
    monitor.report_to_cloud_monitoring(metrics)

    with monitor:  # or both, every 30 seconds
        train()
    ```

    Attributes:
        collection_interval: Seconds, or a timedelta, between two reports while it runs.
        metrics_endpoint: Address of the service.
        project: The Google Cloud project; the credentials' project by default.
        location: The zone or region of the metrics.
        credentials_file: A service account's key; the environment's by default.
        run_dir: The run to read; the newest under runs/ by default.
        sources: Sources to read instead of this machine's own.
    """

    collection_interval: float | timedelta = 30.0
    metrics_endpoint: str = ENDPOINT
    project: str | None = None
    location: str = "global"
    credentials_file: str | None = None
    run_dir: str | Path | None = None
    sources: Sequence[Source] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(
                f"collection_interval is {self.collection_interval}; it must be a positive "
                "number of seconds, for example 30 or timedelta(minutes=1)."
            )

    # --- step by step ----------------------------------------------------------------------

    def with_collection_interval(self, interval: float | timedelta) -> Self:
        """Return a copy that reports at this interval."""
        return replace(self, collection_interval=interval)

    def with_metrics_endpoint(self, endpoint: str) -> Self:
        """Return a copy that reports to this address."""
        return replace(self, metrics_endpoint=endpoint)

    def with_project(self, project: str) -> Self:
        """Return a copy that reports to this project."""
        return replace(self, project=project)

    def with_run_dir(self, run_dir: str | Path) -> Self:
        """Return a copy that reads this run."""
        return replace(self, run_dir=run_dir)

    def build(self) -> Self:
        """Return the monitor; each setting was checked when it was given."""
        return self

    @property
    def seconds(self) -> float:
        """The interval in seconds."""
        interval = self.collection_interval
        return interval.total_seconds() if isinstance(interval, timedelta) else float(interval)

    # --- once ------------------------------------------------------------------------------

    @either_way
    def collect_metrics(self) -> CurrentMetrics:
        """Read all sources now."""
        collector = self._collector
        return collector.summarize(collector.collect())

    @either_way
    def report_to_cloud_monitoring(self, metrics: CurrentMetrics) -> int:
        """Write metrics to Cloud Monitoring; return the number of time series.

        With TPUKIT_PROVIDER=local (the job runs on this machine) and without credentials, nothing
        is written: the result is 0, and a warning gives the reason.

        Raises:
            ProviderError: There are no credentials, or the service refused.
            ConfigError: Nothing names a project.
        """
        try:
            exporter = self._exporter
        except ProviderError as error:
            if os.environ.get(PROVIDER_VARIABLE) != "local":
                raise
            logger.warning("No metrics were reported: %s", error)
            return 0
        return exporter.write(metrics.readings)

    # --- at even intervals -----------------------------------------------------------------

    def start(self) -> Self:
        """Collect and report at every interval, in a thread of its own."""
        self._monitor.start()
        return self

    def stop(self) -> None:
        """Stop collecting, and close connections."""
        if monitor := vars(self).pop("_monitor", None):
            monitor.stop()
            vars(self).pop("_exporter", None)  # the monitor has closed it
        for name in ("_exporter", "_collector"):
            if opened := vars(self).pop(name, None):
                opened.close()

    # Made when first needed, so that collecting needs no credentials.

    @cached_property
    def _monitor(self) -> TPUMonitor:
        return TPUMonitor(
            self.seconds, run_dir=self.run_dir, sources=self.sources, exporters=[self._exporter]
        )

    @cached_property
    def _collector(self) -> MetricsCollector:
        return MetricsCollector(self.sources, run_dir=self.run_dir)

    @cached_property
    def _exporter(self) -> CloudMonitoringExporter:
        return CloudMonitoringExporter(
            self.project,
            endpoint=self.metrics_endpoint,
            location=self.location,
            every_s=max(self.seconds, 5.0),
            credentials_file=self.credentials_file,
        )
