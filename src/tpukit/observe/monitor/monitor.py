"""`TPUMonitor`: a thread that reads chips, host and run, and alerts and exports."""

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ...errors import TPUValidationError, did_you_mean
from ...plain_data import JsonMapping
from ...records.hooks import RunEnd
from ...records.metrics import publish, withdraw
from ...shown import Renderable, Shown
from ..alerts import Action, Alert, AlertRule
from ..alerts.actions import AlertBook
from ..alerts.rule import COOL_DOWN_S, Condition
from ..exporters.files import JsonlExporter
from ..exporters.prometheus import LOOPBACK, PORT, PrometheusExporter
from ..memory_watch import ticks
from ..readings import HOST, Exporter, Reading, Source
from ..sources.training import ProgramSource
from .collector import MetricsCollector
from .current import KEYS, CurrentMetrics

if TYPE_CHECKING:
    from ...job.sections import ObserveSettings

logger = logging.getLogger(__name__)


class GuardedExporters:
    """Passes each round to every exporter; one that fails does not stop the others."""

    def __init__(self, exporters: Sequence[Exporter]) -> None:
        self._exporters = list(exporters)
        self._failing: dict[int, int] = {}

    def export(self, readings: Sequence[Reading]) -> None:
        """Export a round of readings; raises nothing."""
        for exporter in self._exporters:
            key = id(exporter)
            try:
                exporter.export(readings)
            except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
                if key not in self._failing:
                    logger.warning(
                        "the %s exporter fails (%s); it is tried again with every round, and "
                        "this is logged once",
                        exporter.name,
                        error,
                    )
                self._failing[key] = self._failing.get(key, 0) + 1
            else:
                lost = self._failing.pop(key, 0)
                if lost:
                    logger.warning(
                        "the %s exporter works again; %d rounds of readings were lost",
                        exporter.name,
                        lost,
                    )

    def close(self) -> None:
        """Close every exporter."""
        for exporter in self._exporters:
            try:
                exporter.close()
            except Exception as error:  # noqa: BLE001 - the others are to be closed too
                logger.warning("the %s exporter could not be closed: %s", exporter.name, error)


HISTORY_S = 3600.0
STOP_WAIT_S = 5.0


class Startable(ABC):
    """A monitor that runs in the background: started and stopped by calls, or by `with`."""

    @abstractmethod
    def start(self) -> Self:
        """Start it in a thread."""

    @abstractmethod
    def stop(self) -> None:
        """Stop it, and close what it opened."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()


class TPUMonitor(Startable, Shown):
    """Watches the chips, the host and the run on this machine.

    ```python
    monitor = TPUMonitor(update_frequency_seconds=10, enable_prometheus=True)
    with monitor:
        for batch in batches:
            step(batch)
            monitor.record_step()
            print(f"{monitor.get_current_metrics()['utilization']:.1%}")
    ```

    Readings keep to a grid of a monotonic clock. A source, exporter or alert action that fails is
    logged and does not affect the program.

    Args:
        update_frequency_seconds: Seconds from one round of readings to the next.
        enable_prometheus: Serve the newest readings for Prometheus while it runs.
        prometheus_port: Its port; 0 for any free port, which is then in `prometheus_url`.
        prometheus_address: Its interface; the default serves this machine alone.
        run_dir: The run to read, and to write readings to, under hosts/. By default the newest run
            under runs/ is read, and nothing is written.
        sources: Sources to read instead of this machine's own, the most reliable first.
        exporters: Further exporters, which `stop` closes.
        process: Index of this process of the run.
        duration_seconds: Seconds from the first reading to the last; None for no end.
        history_seconds: Seconds for which `get_history` keeps a round.
    """

    def __init__(
        self,
        update_frequency_seconds: float = 10.0,
        enable_prometheus: bool = False,
        prometheus_port: int = PORT,
        *,
        prometheus_address: str = LOOPBACK,
        run_dir: str | Path | None = None,
        sources: Sequence[Source] | None = None,
        exporters: Iterable[Exporter] = (),
        process: int = 0,
        duration_seconds: float | None = None,
        history_seconds: float = HISTORY_S,
    ) -> None:
        if not update_frequency_seconds > 0:
            raise TPUValidationError(
                f"update_frequency_seconds={update_frequency_seconds:g} is no interval; give the "
                "seconds from one reading to the next, above 0."
            )
        self.update_frequency_seconds = float(update_frequency_seconds)
        self._wants_prometheus = enable_prometheus
        self._prometheus_at = (prometheus_port, prometheus_address)
        self._prometheus: PrometheusExporter | None = None
        self._collector = MetricsCollector(sources, run_dir=run_dir, process=process)
        self._process = process
        self._program: ProgramSource | None = None
        self._given = [*exporters]
        if run_dir is not None:
            self._given.append(JsonlExporter(run_dir, process=process))
        self._exporters = GuardedExporters(())
        self._alerts = AlertBook(HOST)
        self._newest = self._collector.summarize(())
        self._duration_s = math.inf if duration_seconds is None else duration_seconds
        self._history_s = history_seconds
        self._history: deque[tuple[float, CurrentMetrics]] = deque()  # with the time of each
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    # --- while it runs ---------------------------------------------------------------------

    def start(self) -> Self:
        """Start reading in a thread; does nothing while it runs.

        Raises:
            TPUValidationError: The port for Prometheus is taken.
        """
        if self.is_running:
            return self
        exporters = [*self._given]
        if self._wants_prometheus:
            port, address = self._prometheus_at
            self._prometheus = PrometheusExporter(port, address=address)
            exporters.append(self._prometheus)
        self._exporters = GuardedExporters(exporters)
        self._ended = threading.Event()
        # A daemon thread, so that a program that never calls `stop` can end.
        self._thread = threading.Thread(
            target=self._run, args=(self._ended,), name="tpukit monitor", daemon=True
        )
        self._thread.start()
        publish(self.get_current_metrics)
        return self

    def stop(self) -> None:
        """Stop reading, and close port, files and connections; may be called twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        withdraw(self.get_current_metrics)
        self._ended.set()
        # A round that is being read is still exported, if it ends in time.
        thread.join(STOP_WAIT_S)
        exporters, self._exporters = self._exporters, GuardedExporters(())
        exporters.close()
        self._prometheus = None
        self._alerts.close()
        self._collector.close()

    @property
    def is_running(self) -> bool:
        """Whether the monitor is running."""
        return self._thread is not None

    @property
    def prometheus_url(self) -> str | None:
        """The address for Prometheus to scrape; None while it is not served."""
        return None if self._prometheus is None else self._prometheus.url

    # --- its metrics ---------------------------------------------------------------------

    def get_current_metrics(self) -> CurrentMetrics:
        """Return the newest metrics; a monitor that is not running reads them now."""
        if not self.is_running:
            self._observe(self._collector.collect())
        return self._newest

    def get_history(self) -> list[CurrentMetrics]:
        """Return the metrics of the last `history_seconds`, the oldest first."""
        return [metrics for _, metrics in tuple(self._history)]

    def record_step(
        self,
        step: int | None = None,
        *,
        loss: float | None = None,
        flops: float | None = None,
        samples: float | None = None,
    ) -> None:
        """Record a completed step of your own loop; steps of `TPUTrainer` are read from its run.

        Args:
            step: Its number; counted by default.
            loss: Loss of the step as a host number; reading it from a device would wait for the
                step.
            flops: Model FLOPs of the step over all chips, for `current_tflops`.
            samples: Sequences in the step over all chips, for `samples_per_s`.
        """
        if self._program is None:
            self._program = ProgramSource(process=self._process)
            self._collector.add(self._program)
        self._program.record(step, loss=loss, flops=flops, samples=samples)

    # --- alerts ----------------------------------------------------------------------------

    def set_alert(
        self,
        metric: str,
        condition: Condition,
        threshold: float,
        action: Action = None,
        *,
        for_s: float = 0.0,
        clear: float | None = None,
        cool_down_s: float = COOL_DOWN_S,
        name: str = "",
    ) -> AlertRule:
        """Add a rule whose action runs when a metric is out of bounds.

        Args:
            metric: A key of `get_current_metrics()`.
            condition: "<", "<=", ">" or ">=".
            threshold: In the metric's unit; shares are 0 to 1.
            action: A function with the `Alert` or without arguments, "log", a web address that gets
                the alert as JSON by POST, or a command as a list of arguments. It runs in a thread
                of its own, where it may fail or hang. The default is "log".
            for_s: Seconds for which the condition must hold before the alert fires.
            clear: The value that ends a firing alert; the threshold by default.
            cool_down_s: The least seconds between two notifications.
            name: The alert's name.

        Raises:
            TPUValidationError: The metric, condition or action is not valid.
        """
        if metric not in KEYS and not metric.startswith(("jax_", "grain_")):
            raise TPUValidationError(
                f"there is no metric {metric!r}; {', '.join(KEYS)} are available."
                + did_you_mean(metric, KEYS)
            )
        rule = AlertRule(
            metric=metric,
            condition=condition,
            threshold=threshold,
            for_s=for_s,
            clear=clear,
            cool_down_s=cool_down_s,
            name=name,
        )
        self._alerts.add(rule, action)
        return rule

    def get_alerts(self) -> list[AlertRule]:
        """Return the rules that are firing."""
        return self._alerts.firing

    # --- the thread ------------------------------------------------------------------------

    def _run(self, ended: threading.Event) -> None:
        times = ticks(self.update_frequency_seconds, duration_s=self._duration_s, stop=ended)
        for _ in times:
            readings = self._collector.collect()
            self._observe(readings)
            self._exporters.export(readings)

    def _observe(self, readings: list[Reading]) -> list[Alert]:
        self._newest = self._collector.summarize(readings)
        now = time.monotonic()
        self._history.append((now, replace(self._newest, readings=())))
        while self._history[0][0] < now - self._history_s:
            self._history.popleft()
        return self._alerts.observe(self._newest, now)

    def __rich__(self) -> Renderable:
        return self._newest.__rich__()


class MonitorHook:
    """Writes readings of each host's chips to the run's folder while it trains, under hosts/.

    ```python
    TPUTrainer(model="llama3.2-1b", hooks=[MonitorHook()]).train(data, 1000)
    ```

    Args:
        update_frequency_seconds: Seconds from one round of readings to the next.
        **settings: Further arguments of `TPUMonitor`.

    Attributes:
        monitor: The monitor, while the run trains.
    """

    on_every_process = True

    def __init__(self, update_frequency_seconds: float = 1.0, **settings: Any) -> None:
        self._every_s, self._settings = update_frequency_seconds, settings
        self.monitor: TPUMonitor | None = None

    @classmethod
    def as_set(cls, section: "ObserveSettings", **settings: Any) -> Self:
        """Build the hook from the `observe:` section of a job."""
        return cls(
            section.monitoring_interval_seconds,
            duration_seconds=section.monitoring_duration_seconds,
            history_seconds=section.allocation_history_retention_seconds,
            **settings,
        )

    def on_start(self, run_dir: Path, identity: JsonMapping) -> None:
        """Start the monitor."""
        import jax

        self.monitor = TPUMonitor(
            self._every_s, run_dir=run_dir, process=jax.process_index(), **self._settings
        ).start()

    def on_record(self, record: JsonMapping) -> None:
        """Do nothing: the monitor reads the records itself."""

    def on_end(self, result: RunEnd | None) -> None:
        """Stop the monitor."""
        if self.monitor is not None:
            self.monitor.stop()
            self.monitor = None
