"""What a configuration answers: peak and measured performance, and how memory is spent."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...hardware.missing import Measured, Missing, plain
from ...plain_data import JsonObject
from ...records.metrics import RunTailReader, current_measurements, newest_run
from ...records.mirror import readable
from ...records.names import METRICS_FILE, MFU, STEP, STEP_TIME
from ...shown import Renderable, Shown


@dataclass(frozen=True)
class PerformanceMetrics(Shown, Mapping[str, Measured]):
    """Named figures, each with its origin, or missing with the reason.

    Read it like a dictionary: `metrics["total_tflops"]`, `metrics.origins["total_tflops"]`,
    `metrics.reasons["utilization"]`. A missing figure formats as a dash under any format spec.
    """

    values_by_name: Mapping[str, Measured]
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    sources: Mapping[str, str] = field(default_factory=dict[str, str])

    class Builder:
        """Collects figures one by one."""

        def __init__(self) -> None:
            self._values: dict[str, Measured] = {}
            self._origins: dict[str, str] = {}
            self._sources: dict[str, str] = {}

        def add(self, name: str, value: Measured, origin: str, source: str = "") -> None:
            """Add a figure; origin and source count if it is not missing."""
            self._values[name] = value
            if not isinstance(value, Missing):
                self._origins[name], self._sources[name] = origin, source

        def build(self) -> "PerformanceMetrics":
            """The figures, frozen."""
            return PerformanceMetrics(self._values, self._origins, self._sources)

    @property
    def reasons(self) -> dict[str, str]:
        """Why each missing figure is missing."""
        return {
            name: value.reason
            for name, value in self.values_by_name.items()
            if isinstance(value, Missing)
        }

    def __getitem__(self, name: str) -> Measured:
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)

    def to_dict(self) -> JsonObject:
        """Each figure with its origin and source, or null with its reason."""
        return {
            name: {
                "value": plain(value),
                "origin": self.origins.get(name),
                "source": self.sources.get(name) or None,
                "reason": self.reasons.get(name),
            }
            for name, value in self.values_by_name.items()
        }

    def __rich__(self) -> Renderable:
        """A table: figure, value, where it came from or why it is missing."""
        from rich.table import Table

        table = Table("figure", "value", "origin", box=None)
        for name, value in self.values_by_name.items():
            shown = f"{value:,.4g}" if value < 1 else f"{value:,.1f}"
            origin = ", ".join(filter(None, (self.origins.get(name), self.sources.get(name))))
            table.add_row(name, shown, origin or self.reasons.get(name, ""))
        return table


@dataclass(frozen=True)
class MemoryConfig(Mapping[str, Any]):
    """How a configuration spends memory; read it like a dictionary or by attribute."""

    use_mixed_precision: bool
    compute_dtype: str
    param_dtype: str
    memory_per_chip_bytes: int | None
    planned_bytes: int | None
    memory_fraction: float
    memory_optimization: str
    enable_rematerialization: bool
    gradient_checkpointing: bool

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dataclass_fields__)

    def __len__(self) -> int:
        return len(self.__dataclass_fields__)

    def to_dict(self) -> JsonObject:
        """The fields as plain data."""
        return dict(self)


NOTHING = "nothing was measured: no monitor runs and there is no run under runs/; give run_dir"


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """Figures of a run, medians over its last steps.

    Attributes:
        utilization: Model FLOPs over the peak (MFU).
        samples_per_s: Sequences a second, of all chips together.
        source: Which run or monitor they are from.
    """

    utilization: Measured
    samples_per_s: Measured
    source: str


def measured_figures(run_dir: str | Path | None = None) -> RunFigures:
    """Return the figures of a run: the one given, else the monitored one, else the newest."""
    if run_dir is not None:
        return _of_run(readable(run_dir))
    monitored = current_measurements() or {}
    mfu, samples = monitored.get(MFU), monitored.get("samples_per_s")
    if isinstance(mfu, float) or isinstance(samples, float):
        lacking = Missing("the running monitor does not measure it")
        return RunFigures(
            utilization=lacking if mfu is None else mfu,
            samples_per_s=lacking if samples is None else samples,
            source="the running monitor",
        )
    newest = newest_run()
    if newest is not None:
        return _of_run(newest)
    return RunFigures(utilization=Missing(NOTHING), samples_per_s=Missing(NOTHING), source="")


def _of_run(path: Path) -> RunFigures:
    try:
        tail = RunTailReader(path).read()
        reason = f"{path} has completed no step yet"
    except OSError as error:
        tail, reason = None, f"{path / METRICS_FILE} cannot be read ({error.strerror})"
    if tail is None:
        return RunFigures(utilization=Missing(reason), samples_per_s=Missing(reason), source="")
    mfu, step_s = tail.median(MFU), tail.median(STEP_TIME)
    count, last = len(tail.records), tail.record.get(STEP)
    source = f"{path}, " + (f"the {count} steps to step {last}" if count > 1 else f"step {last}")
    return RunFigures(
        utilization=Missing(f"{path} records no MFU: no peak or no FLOPs are known for it")
        if mfu is None
        else mfu,
        samples_per_s=Missing(f"run.json of {path} does not say how many sequences a step has")
        if tail.batch_size is None or not step_s
        else tail.batch_size / step_s,
        source=source,
    )
