"""`TpuMonitor` of document 004: metrics of this host, reported to Cloud Monitoring."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from ...errors import ConfigError, ProviderError
from ...job.sections import PROVIDER_VARIABLE
from ...runtime.calls import either_way
from ..exporters.cloud_monitoring import ENDPOINT, CloudMonitoringExporter
from ..sources.protocol import Source
from .collector import MetricsCollector
from .current import CurrentMetrics
from .monitor import TPUMonitor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TpuMonitor:
    """Collects metrics when asked, or at even intervals, for Cloud Monitoring.

    ```python
    monitor = TpuMonitor().with_collection_interval(30).with_project("p").build()
    metrics = monitor.collect_metrics()  # awaited, in a coroutine
    monitor.report_to_cloud_monitoring(metrics)

    with monitor:  # or both, every 30 seconds
        train()
    ```

    Attributes:
        collection_interval: Seconds, or a timedelta, between two reports while it runs.
        metrics_endpoint: Whom to report to.
        project: Whose metrics they are; by default the one that the credentials name.
        location: Zone or region that they are filed under.
        credentials_file: A service account's key; the environment's by default.
        run_dir: The run to read; the newest under runs/ by default.
        sources: What to read instead of what suits this machine.
    """

    collection_interval: float | timedelta = 30.0
    metrics_endpoint: str = ENDPOINT
    project: str | None = None
    location: str = "global"
    credentials_file: str | None = None
    run_dir: str | Path | None = None
    sources: Sequence[Source] | None = field(default=None, repr=False)
    # What is open: made when it is first needed, so that collecting needs no credentials.
    _collectors: list[MetricsCollector] = field(
        default_factory=list[MetricsCollector], repr=False, init=False
    )
    _exporters: list[CloudMonitoringExporter] = field(
        default_factory=list[CloudMonitoringExporter], repr=False, init=False
    )
    _running: list[TPUMonitor] = field(default_factory=list[TPUMonitor], repr=False, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(
                f"collection_interval is {self.collection_interval}; it must be some seconds, for "
                "example 30 or timedelta(minutes=1)."
            )

    # --- step by step ----------------------------------------------------------------------

    def with_collection_interval(self, interval: float | timedelta) -> Self:
        """Report this often."""
        return replace(self, collection_interval=interval)

    def with_metrics_endpoint(self, endpoint: str) -> Self:
        """Report to this address."""
        return replace(self, metrics_endpoint=endpoint)

    def with_project(self, project: str) -> Self:
        """Report to this project."""
        return replace(self, project=project)

    def with_run_dir(self, run_dir: str | Path) -> Self:
        """Read this run."""
        return replace(self, run_dir=run_dir)

    def build(self) -> Self:
        """Return the monitor; everything was checked as it was given."""
        return self

    @property
    def seconds(self) -> float:
        """The interval in seconds."""
        interval = self.collection_interval
        return interval.total_seconds() if isinstance(interval, timedelta) else float(interval)

    # --- once ------------------------------------------------------------------------------

    @either_way
    def collect_metrics(self) -> CurrentMetrics:
        """Read everything now."""
        collector = self._collector
        return collector.summarize(collector.collect())

    @either_way
    def report_to_cloud_monitoring(self, metrics: CurrentMetrics) -> int:
        """Write metrics to Cloud Monitoring; return how many time series that were.

        Where TPUKIT_PROVIDER=local says that the job runs on this machine, and there are no
        credentials, nothing is written: the result is 0, and a warning gives the reason.

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
        if not self._running:
            monitor = TPUMonitor(
                self.seconds,
                run_dir=self.run_dir,
                sources=self.sources,
                exporters=[self._exporter],
            )
            self._running.append(monitor.start())
        return self

    def stop(self) -> None:
        """Collect no more, and close connections."""
        while self._running:
            self._running.pop().stop()
            self._exporters.clear()
        while self._exporters:
            self._exporters.pop().close()
        while self._collectors:
            self._collectors.pop().close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _collector(self) -> MetricsCollector:
        if not self._collectors:
            self._collectors.append(MetricsCollector(self.sources, run_dir=self.run_dir))
        return self._collectors[0]

    @property
    def _exporter(self) -> CloudMonitoringExporter:
        if not self._exporters:
            self._exporters.append(
                CloudMonitoringExporter(
                    self.project,
                    endpoint=self.metrics_endpoint,
                    location=self.location,
                    every_s=max(self.seconds, 5.0),
                    credentials_file=self.credentials_file,
                )
            )
        return self._exporters[0]
