"""`MetricsCollector`: which sources suit this machine, and one round of reading them all."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...hardware.detect import Accelerators, detect_accelerators
from ..readings import METRICS, Reading, ReadingBuilder, Source
from ..sources.libtpu_grpc import LibtpuSource
from ..sources.libtpu_sdk import LibtpuSdkSource
from ..sources.machine import HostSource, JaxSource, NvmlSource
from ..sources.prometheus import PrometheusSource
from ..sources.training import OverheadSource, TrainerSource
from .current import CurrentMetrics, summarize

logger = logging.getLogger(__name__)
# As in tpu-info: set where Orbax or Grain serves its metrics.
SERVED_PORTS = ("ORBAX_PROMETHEUS_PORT", "PYGRAIN_PROMETHEUS_PORT")
NO_POWER = "TPUs publish no power consumption"
NO_CHIPS = "this machine has no TPU and no GPU"


class MetricsCollector:
    """Reads all sources one after the other; an error of one source does not affect the others.

    Args:
        sources: Sources to read, the most reliable first; this machine's own by default.
        run_dir: The run whose records are read; by default the newest under runs/.
        process: Index of the process of the run.
        here: This machine's accelerators; detected by default.
    """

    def __init__(
        self,
        sources: Sequence[Source] | None = None,
        *,
        run_dir: str | Path | None = None,
        process: int = 0,
        here: Accelerators | None = None,
    ) -> None:
        accelerators = here or detect_accelerators()
        self.sources: tuple[Source, ...] = (
            default_sources(accelerators, run_dir=run_dir, process=process)
            if sources is None
            else tuple(sources)
        )
        self._absent = _absent(accelerators) if sources is None else {}
        self._process = process
        self._failed: set[str] = set()

    def add(self, source: Source) -> None:
        """Read this source too, as the most reliable one."""
        self.sources = (source, *self.sources)

    def collect(self) -> list[Reading]:
        """Read every source now."""
        return [self._read(source) for source in self.sources]

    def summarize(self, readings: Sequence[Reading]) -> CurrentMetrics:
        """Return a round of readings as one mapping."""
        reason = (
            "no source on this machine measures it" if readings else "no reading has been taken yet"
        )
        return summarize(readings, absent=self._absent, reason=reason)

    def close(self) -> None:
        """Close every source."""
        for source in self.sources:
            source.close()

    def _read(self, source: Source) -> Reading:
        try:
            reading = source.read()
        except Exception as error:  # noqa: BLE001 - a source of anyone's must not end the monitor
            reason = f"its source failed: {type(error).__name__}: {error}"
            if source.name not in self._failed:
                self._failed.add(source.name)
                logger.warning(
                    "the source %s failed and will be read again: %s", source.name, error
                )
            return ReadingBuilder(source.name, [source.name], process=self._process).build(
                otherwise=reason
            )
        self._failed.discard(source.name)
        return reading


def default_sources(
    here: Accelerators, *, run_dir: str | Path | None = None, process: int = 0
) -> tuple[Source, ...]:
    """Return the sources that have metrics on this machine, the most reliable first.

    jax's own count of memory comes before NVML's: jax takes most of a GPU's memory at its start,
    and NVML counts all of that as used.
    """
    chips: tuple[Source, ...] = ()
    if here.kind == "tpu":
        chips = (LibtpuSource(process=process), LibtpuSdkSource(process=process))
    elif here.kind == "gpu":
        chips = (JaxSource(process=process), NvmlSource(process=process))
    if here.kind != "gpu":
        chips = (*chips, JaxSource(process=process))
    ports = dict.fromkeys(os.environ[name] for name in SERVED_PORTS if os.environ.get(name))
    return (
        *chips,
        HostSource(process=process),
        TrainerSource(run_dir, process=process),
        OverheadSource(run_dir, process=process),
        *(PrometheusSource(f"http://localhost:{port}/metrics", process=process) for port in ports),
    )


def _absent(here: Accelerators) -> Mapping[str, str]:
    """Return why chip metrics have no source on a machine of this kind, by metric."""
    if here.kind == "tpu":
        return {"power_watts": NO_POWER, "temperature_celsius": "TPUs publish no temperature"}
    if here.kind == "gpu":
        return {
            name: "only libtpu reports it, and this machine has GPUs"
            for name, metric in METRICS.items()
            if metric.libtpu_name
        }
    return {name: NO_CHIPS for name, metric in METRICS.items() if metric.scope == "chip"}
