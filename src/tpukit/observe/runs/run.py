"""`Run`: a run directory, read while it is written. Nothing here writes, or needs jax."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...errors import TPUValidationError, did_you_mean
from ...records.attempts import RunAttempt, attempts_of, read_attempts
from ...records.events import Event
from ...runtime.run_files import (
    EVENTS_FILE,
    HOST_READINGS_FILE,
    HOSTS_FOLDER,
    IDENTITY_FILE,
    METRICS_FILE,
)
from ..readings import METRICS, Reading
from ..stragglers.detection import HostRecords, detect_stragglers, read_host_steps
from ..stragglers.report import StragglerReport
from .goodput import RunGoodput, goodput_of
from .growing_file import GrowingFile
from .host_readings import TAIL, HostReadings, newest_readings, share_of
from .records_table import PARSING, RecordsTable, parse_records
from .series import Axis, Numbers, Series, make_series
from .summary import RunSummary, summarise

CLOCKS_APART_S = 5.0
# Of all hosts' newest records together, to find stragglers: with many hosts less of each will do.
STEP_BYTES, READING_BYTES = 2 << 20, 1 << 20
# What the glossary calls the figures that metrics.jsonl has under another name.
RECORDED_AS = {
    "step_time_seconds": "step_time_s",
    "input_stall_seconds": "input_stall_s",
    "tokens_per_second_per_chip": "tokens_per_s_per_chip",
}


class Run:
    """One run directory; every call reads what was added since the last. Threads may share it.

    Args:
        path: The folder that `tpukit train` wrote, or still writes.

    Raises:
        TPUValidationError: It is no folder of a run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not is_run(self.path):
            raise TPUValidationError(
                f"{self.path} is no run directory ({IDENTITY_FILE} is missing); name the folder "
                "that `tpukit train --run-dir` wrote."
            )
        self.name = self.path.resolve().name
        self._lock = threading.RLock()
        self.unload()

    def unload(self) -> None:
        """Forget everything that was read, so that the next call reads it again."""
        self._metrics_file = GrowingFile(self.path / METRICS_FILE, inside=self.path)
        self._table = RecordsTable()
        self._events_file = GrowingFile(self.path / EVENTS_FILE, inside=self.path)
        self._events: list[Event] = []
        self._event_lines: list[int] = []
        self._hosts: dict[int, HostReadings] = {}

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def summary(self, *, now: float | None = None) -> RunSummary:
        """Return how the run is doing.

        Args:
            now: Unix seconds to tell ages from; the time of this call by default.
        """
        events, attempts = self.events(), self.attempts()
        if not self._metrics_file.error:
            self._metrics_file.check()
        return summarise(
            self.path,
            events,
            attempts,
            goodput_of(attempts),
            now=time.time() if now is None else now,
            problem=self._metrics_file.error or self._events_file.error,
        )

    def series(
        self,
        metric: str,
        *,
        points: int = 1000,
        start: float | None = None,
        end: float | None = None,
        by: Axis = "step",
        process: int = 0,
        chip: int | None = None,
    ) -> Series:
        """Return a metric over steps or time, thinned with its extremes kept.

        Args:
            metric: A name in metrics.jsonl, or a metric of the glossary that monitors read.
            points: The most to return.
            start: The first step, or unix second, to return.
            end: The last one.
            by: "step" or "time".
            process: Whose monitor, for metrics of chips and hosts.
            chip: Which of its chips; the mean of them by default.

        Raises:
            TPUValidationError: The run has no such metric.
        """
        with self._lock:
            x, y = self._columns(metric, by, process, chip)
            return make_series(metric, x, y, by=by, points=points, start=start, end=end)

    def metrics(self) -> list[str]:
        """Return the names that `series` knows."""
        with self._lock:
            self._poll_metrics()
            own = [name for name in self._table.names() if name not in ("step", "time")]
            read = (name for process in self.processes() for name in self._host(process).metrics())
            return list(dict.fromkeys([*own, *read]))

    @property
    def loaded_bytes(self) -> int:
        """Bytes of numbers that are kept of its files."""
        hosts = sum(host.loaded_bytes for host in self._hosts.values())
        return self._table.loaded_bytes + hosts

    def events(self) -> Sequence[Event]:
        """Return what happened, in order."""
        with self._lock:
            for piece in self._events_file.poll():
                if piece.keep < len(self._event_lines):
                    kept = self._event_lines[piece.keep]
                    del self._events[kept:], self._event_lines[piece.keep :]
                for record in parse_records(piece.lines):
                    self._event_lines.append(len(self._events))
                    event = Event.from_dict(record) if record else None
                    self._events += [event] if event else []
            return tuple(self._events)

    def attempts(self) -> list[RunAttempt]:
        """Return the attempts at the run, the last up to its newest step."""
        return read_attempts(self.path, self.events())

    def goodput(self) -> RunGoodput:
        """Return where the time went, across all attempts."""
        return goodput_of(self.attempts())

    def processes(self) -> list[int]:
        """Return the processes that left records of their own."""
        try:
            names = os.listdir(self.path / HOSTS_FOLDER)
        except OSError:
            return []
        return sorted(int(name) for name in names if name.isdecimal())

    def readings(self) -> dict[tuple[int, str], Reading]:
        """Return the latest reading of each process and source."""
        found: dict[tuple[int, str], Reading] = {}
        for process in self.processes():
            for reading in self.newest_readings(process):
                found[process, reading.source] = reading
        return found

    def stragglers(self) -> StragglerReport:
        """Return the hosts that hold the run up, with the cause of each."""
        attempts = attempts_of(self.events())
        # Clocks of hosts differ a little.
        since = attempts[-1].began - CLOCKS_APART_S if attempts else 0.0
        processes = self.processes()
        step_bytes = share_of(STEP_BYTES, len(processes))
        reading_bytes = share_of(READING_BYTES, len(processes))
        hosts: list[HostRecords] = []
        for process in processes:
            steps = read_host_steps(self.path, process, size=step_bytes, since=since)
            readings = self.newest_readings(process, reading_bytes)
            hosts.append(HostRecords(process, steps, [r for r in readings if r.time >= since]))
        return detect_stragglers(hosts)

    def _columns(
        self, metric: str, by: Axis, process: int, chip: int | None
    ) -> tuple[Numbers, Numbers]:
        self._poll_metrics()
        name = RECORDED_AS.get(metric, metric)
        if name in self._table.names() and name not in ("step", "time"):
            x, y = self._table.columns(by, name)
            return x, y
        if metric in METRICS and process in self.processes():
            x, y = self._host(process).history(metric, chip)
            return (self._steps_at(x), y) if by == "step" else (x, y)
        known = self.metrics()
        raise TPUValidationError(
            f"{self.name} has no metric '{metric}'; it has {', '.join(known) or 'none yet'}."
            + did_you_mean(metric, known)
        )

    def _host(self, process: int) -> HostReadings:
        if process not in self._hosts:
            self._hosts[process] = HostReadings(self.readings_file(process), inside=self.path)
        return self._hosts[process]

    def newest_readings(self, process: int, size: int = TAIL) -> list[Reading]:
        """Return what a process's monitor wrote into the last `size` bytes of its file."""
        return newest_readings(self.readings_file(process), size, inside=self.path)

    def readings_file(self, process: int) -> Path:
        """Return where a process's monitor writes."""
        return self.path / HOSTS_FOLDER / str(process) / HOST_READINGS_FILE

    def _steps_at(self, times: Numbers) -> Numbers:
        """Return the step that the run was at, at some times; NaN before it recorded any."""
        step, at = self._table.columns("step", "time")
        if not len(step):
            return np.full(len(times), np.nan)
        order = np.argsort(at, kind="stable")
        return np.interp(times, at[order], step[order])

    def _poll_metrics(self) -> None:
        for piece in self._metrics_file.poll():
            with PARSING:
                self._table.add(piece)


def is_run(path: Path) -> bool:
    """Whether a folder is a run's; one that may not be looked into is none."""
    try:
        return (path / IDENTITY_FILE).is_file()
    except OSError:
        return False


def find_runs(folder: str | Path) -> list[Run]:
    """Return the runs in a folder, or the one that it is, the most recently written first."""
    folder = Path(folder)
    if is_run(folder):
        return [Run(folder)]
    try:
        found = [Run(one) for one in folder.iterdir() if is_run(one)]
    except OSError:
        return []
    return sorted(found, key=lambda run: -_written(run.path))


def _written(path: Path) -> float:
    for name in (METRICS_FILE, EVENTS_FILE, IDENTITY_FILE):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0
