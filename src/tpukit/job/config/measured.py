"""What was measured of a run: by the monitor of this process, or in the files of the run."""

from dataclasses import dataclass
from pathlib import Path

from ...hardware.missing import Measured, Missing
from ...runtime.measurements import current_measurements
from ...runtime.run_files import METRICS_FILE
from ...runtime.run_tail import newest_run, read_tail

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
        return _of_run(Path(run_dir))
    monitored = current_measurements() or {}
    mfu, samples = monitored.get("mfu"), monitored.get("samples_per_s")
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
        tail = read_tail(path)
        reason = f"{path} has completed no step yet"
    except OSError as error:
        tail, reason = None, f"{path / METRICS_FILE} cannot be read ({error.strerror})"
    if tail is None:
        return RunFigures(utilization=Missing(reason), samples_per_s=Missing(reason), source="")
    mfu, step_s = tail.median("mfu"), tail.median("step_time_s")
    count, last = len(tail.records), tail.record.get("step")
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
