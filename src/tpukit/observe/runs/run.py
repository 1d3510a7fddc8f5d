"""`Run`: a run directory, read while it is written; loads no jax and writes nothing."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ...errors import TPUValidationError, did_you_mean
from ...records.attempts import RunAttempt, attempts_of, read_attempts
from ...records.events import Event
from ...records.lines import parse_lines
from ...records.mirror import readable
from ...records.names import (
    EVENTS_FILE,
    HOST_READINGS_FILE,
    HOSTS_FOLDER,
    IDENTITY_FILE,
    LOG_FILE,
    METRICS_FILE,
    STEP,
    TIME,
)
from ..readings import METRICS, RECORDED_AS, Reading
from ..stragglers.comparison import StragglerReport
from ..stragglers.detection import HostRecords, detect_stragglers, read_host_steps
from .goodput import RunGoodput, goodput_of
from .growing_file import GrowingFile
from .host_readings import TAIL, HostReadings, newest_readings, share_of
from .series import PARSING, Axis, Numbers, RecordsTable, Series, make_series
from .summary import RunSummary, summarise

CLOCKS_APART_S = 5.0
LOG_POLL_S = 1.0
# Bytes read of all hosts' newest records to find stragglers; with many hosts, fewer per host.
STEP_BYTES, READING_BYTES = 2 << 20, 1 << 20


class Run:
    """One run directory; every call reads the lines added since the last. Threads may share it.

    Args:
        path: The folder or address that `tpukit train` wrote or is writing.

    Raises:
        TPUValidationError: It is no run directory.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = readable(path)
        if not is_run(self.path):
            raise TPUValidationError(
                f"{path} is no run directory ({IDENTITY_FILE} is missing); name the folder "
                "that `tpukit train --run-dir` wrote."
            )
        self.name = self.path.resolve().name
        self._lock = threading.RLock()
        self.unload()

    def unload(self) -> None:
        """Discard all data read, so that the next call reads it again."""
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
            now: Unix seconds that ages refer to; the current time by default.
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
            metric: A name in metrics.jsonl, or a metric of monitor readings.
            points: The most points to return.
            start: The first step or unix second.
            end: The last step or unix second.
            by: "step" or "time".
            process: The process whose monitor to read, for metrics of chips and hosts.
            chip: One of its chips; their mean by default.

        Raises:
            TPUValidationError: The run has no such metric.
        """
        with self._lock:
            x, y = self._columns(metric, by, process, chip)
            return make_series(metric, x, y, by=by, points=points, start=start, end=end)

    def metrics(self) -> list[str]:
        """Return the metrics that `series` accepts."""
        with self._lock:
            self._poll_metrics()
            own = [name for name in self._table.names() if name not in (STEP, TIME)]
            read = (name for process in self.processes() for name in self._host(process).metrics())
            return list(dict.fromkeys([*own, *read]))

    @property
    def loaded_bytes(self) -> int:
        """Bytes of numbers in memory."""
        hosts = sum(host.loaded_bytes for host in self._hosts.values())
        return self._table.loaded_bytes + hosts

    def events(self) -> Sequence[Event]:
        """Return what happened, in order."""
        with self._lock:
            for piece in self._events_file.poll():
                if piece.keep < len(self._event_lines):
                    kept = self._event_lines[piece.keep]
                    del self._events[kept:], self._event_lines[piece.keep :]
                for record in parse_lines(piece.lines):
                    self._event_lines.append(len(self._events))
                    event = Event.from_dict(record) if record else None
                    self._events += [event] if event else []
            return tuple(self._events)

    def log(self, *, follow: bool = False) -> Iterator[str]:
        """Yield the lines of the run's log.

        Args:
            follow: Whether to wait for more lines while the run is running.
        """
        file = GrowingFile(self.path / LOG_FILE, inside=self.path)
        while True:
            is_running = follow and self.summary().state == "running"
            for piece in file.poll():
                for line in piece.lines:
                    yield line.decode(errors="replace")
            if not is_running:
                return
            time.sleep(LOG_POLL_S)

    def attempts(self) -> list[RunAttempt]:
        """Return the attempts, an unfinished one up to its newest step."""
        return read_attempts(self.path, self.events())

    def goodput(self) -> RunGoodput:
        """Return the goodput, over all attempts."""
        return goodput_of(self.attempts())

    def processes(self) -> list[int]:
        """Return the processes that wrote records."""
        try:
            names = os.listdir(self.path / HOSTS_FOLDER)
        except OSError:
            return []
        return sorted(int(name) for name in names if name.isdecimal())

    def readings(self) -> dict[tuple[int, str], Reading]:
        """Return the latest reading of each process and source."""
        newest: dict[tuple[int, str], Reading] = {}
        for process in self.processes():
            for reading in self.newest_readings(process):
                newest[process, reading.source] = reading
        return newest

    def stragglers(self) -> StragglerReport:
        """Return the slow hosts with their causes."""
        attempts = attempts_of(self.events())
        # The hosts' clocks differ slightly.
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
        if name in self._table.names() and name not in (STEP, TIME):
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
        """Return the readings in the last `size` bytes of a process's file."""
        return newest_readings(self.readings_file(process), size, inside=self.path)

    def readings_file(self, process: int) -> Path:
        """Return the path of a process's readings."""
        return self.path / HOSTS_FOLDER / str(process) / HOST_READINGS_FILE

    def _steps_at(self, times: Numbers) -> Numbers:
        """Return the run's step at some times; NaN without any recorded step."""
        step, at = self._table.columns(STEP, TIME)
        if not len(step):
            return np.full(len(times), np.nan)
        order = np.argsort(at, kind="stable")
        return np.interp(times, at[order], step[order])

    def _poll_metrics(self) -> None:
        for piece in self._metrics_file.poll():
            with PARSING:
                self._table.add(piece)


def is_run(path: Path) -> bool:
    """Return whether a folder is a run directory; False where it cannot be read."""
    try:
        return (path / IDENTITY_FILE).is_file()
    except OSError:
        return False


def find_runs(folder: str | Path) -> list[Run]:
    """Return the runs in a folder, the most recently written first; a run directory is one run."""
    folder = readable(folder)
    if is_run(folder):
        return [Run(folder)]
    try:
        runs = [Run(path) for path in folder.iterdir() if is_run(path)]
    except OSError:
        return []
    return sorted(runs, key=lambda run: -_written(run.path))


def _written(path: Path) -> float:
    for name in (METRICS_FILE, EVENTS_FILE, IDENTITY_FILE):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0
