"""`TPUMonitor`: a thread that reads chips, host and run, alerts, and exports."""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...errors import TPUValidationError, did_you_mean
from ...runtime.measurements import publish, withdraw
from ...shown import Shown
from ..alerts import Action, Alert, AlertRule
from ..alerts.book import AlertBook
from ..alerts.rule import COOL_DOWN_S, Condition
from ..exporters.jsonl import JsonlExporter
from ..exporters.prometheus import LOOPBACK, PORT, PrometheusExporter
from ..exporters.protocol import Exporter
from ..memory_watch import ticks
from ..readings import Reading
from ..readings.reading import HOST
from ..sources.program import ProgramSource
from ..sources.protocol import Source
from .collector import MetricsCollector
from .current import KEYS, CurrentMetrics
from .exporting import GuardedExporters

HISTORY_S = 3600.0
STOP_WAIT_S = 5.0


class TPUMonitor(Shown):
    """Watches the chips and the run of this host; on a machine without chips, what there is.

    ```python
    monitor = TPUMonitor(update_frequency_seconds=10, enable_prometheus=True)
    with monitor:
        for batch in batches:
            step(batch)
            monitor.record_step()
            print(f"{monitor.get_current_metrics()['utilization']:.1%}")
    ```

    Readings keep to a grid of a clock that does not jump. Whatever fails, a source, an exporter or
    an alert's action, is logged and leaves the program alone.

    Args:
        update_frequency_seconds: Seconds from one round of readings to the next.
        enable_prometheus: Serve the newest readings for Prometheus while it runs.
        prometheus_port: Where; 0 for any free port, `prometheus_url` then says which.
        prometheus_address: Which interface; the default serves this machine alone.
        run_dir: The run to read; readings are kept in it too, under hosts/. By default the newest
            run under runs/ is read, and nothing is written.
        sources: What to read instead of what suits this machine, the surest first.
        exporters: Where readings go as well; they are closed at `stop`.
        process: Index of this process of the run.
        duration_seconds: How long it reads, from the first reading to the last; None for as long as
            it runs.
        history_seconds: How long `get_history` remembers a round.
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
        self._history: deque[tuple[float, CurrentMetrics]] = deque()  # with when each was read
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    # --- while it runs ---------------------------------------------------------------------

    def start(self) -> Self:
        """Begin to read, in a thread of its own; does nothing if it already does.

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
        # A daemon: a program that forgets to stop it, or dies, ends all the same.
        self._thread = threading.Thread(
            target=self._run, args=(self._ended,), name="tpukit monitor", daemon=True
        )
        self._thread.start()
        publish(self.get_current_metrics)
        return self

    def stop(self) -> None:
        """Read no more, and let go of port, files and connections; may be called twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        withdraw(self.get_current_metrics)
        self._ended.set()
        # The round that is being read is still exported, but not waited for for ever.
        thread.join(STOP_WAIT_S)
        exporters, self._exporters = self._exporters, GuardedExporters(())
        exporters.close()
        self._prometheus = None
        self._alerts.close()
        self._collector.close()

    @property
    def is_running(self) -> bool:
        """Whether it reads."""
        return self._thread is not None

    @property
    def prometheus_url(self) -> str | None:
        """Where Prometheus may scrape, while it may."""
        return None if self._prometheus is None else self._prometheus.url

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # --- what it knows ---------------------------------------------------------------------

    def get_current_metrics(self) -> CurrentMetrics:
        """Return the newest metrics at once; while it does not run, it reads them now."""
        if not self.is_running:
            self._observe(self._collector.collect())
        return self._newest

    def get_history(self) -> list[CurrentMetrics]:
        """Return the rounds of the last `history_seconds`, the oldest first."""
        return [metrics for _, metrics in tuple(self._history)]

    def record_step(
        self,
        step: int | None = None,
        *,
        loss: float | None = None,
        flops: float | None = None,
        samples: float | None = None,
    ) -> None:
        """Tell it that a step of your own loop has completed; `TPUTrainer`'s it reads itself.

        Args:
            step: Its number; counted by default.
            loss: Of the step, as a number of the host: one on a device would be waited for.
            flops: Of the model in this step, on all chips together, for `current_tflops`.
            samples: Sequences in this step, on all chips together, for `samples_per_s`.
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
        """Have something done when a metric is out of bounds.

        Args:
            metric: A key of `get_current_metrics()`.
            condition: "<", "<=", ">" or ">=".
            threshold: In the metric's unit; shares are 0 to 1.
            action: A function that takes the `Alert` or nothing, "log", a web address that it is
                POSTed to as JSON, or a command as a list of arguments. It runs in a thread of its
                own; one that fails or hangs hurts nobody. The default writes to the log.
            for_s: How long the condition has to hold before it fires.
            clear: Where a firing alert is over, if not at the threshold.
            cool_down_s: From one notification to the next at least.
            name: What the alert is called.

        Raises:
            TPUValidationError: The metric, the condition or the action is none.
        """
        if metric not in KEYS and not metric.startswith(("jax_", "grain_")):
            raise TPUValidationError(
                f"there is no metric {metric!r}; {', '.join(KEYS)} are there."
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
        """Return the rules that fire now."""
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

    def __rich__(self) -> Any:
        return self._newest.__rich__()
