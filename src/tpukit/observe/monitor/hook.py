"""`MonitorHook`: a monitor beside a training run, on every process, for as long as it trains."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ...job.sections import ObserveSettings
from ...records.hooks import RunEnd
from .monitor import TPUMonitor


class MonitorHook:
    """Keeps readings of each host's chips in the run's folder, under hosts/.

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
    def as_set(cls, section: ObserveSettings, **settings: Any) -> Self:
        """Return the hook that the `observe:` section of a job describes."""
        return cls(
            section.monitoring_interval_seconds,
            duration_seconds=section.monitoring_duration_seconds,
            history_seconds=section.allocation_history_retention_seconds,
            **settings,
        )

    def on_start(self, run_dir: Path, identity: Mapping[str, Any]) -> None:
        """Begin to read."""
        import jax

        self.monitor = TPUMonitor(
            self._every_s, run_dir=run_dir, process=jax.process_index(), **self._settings
        ).start()

    def on_record(self, record: Mapping[str, Any]) -> None:
        """Do nothing: the monitor reads the records itself."""

    def on_end(self, result: RunEnd | None) -> None:
        """Read no more."""
        if self.monitor is not None:
            self.monitor.stop()
            self.monitor = None
