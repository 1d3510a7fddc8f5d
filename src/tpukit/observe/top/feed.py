"""Where the screen's figures come from: this machine, a run directory, other hosts, a recording."""

import dataclasses
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import TPUError, TPUValidationError
from ...hardware.detect import Accelerators, detect_accelerators
from ...hardware.figure import Figure
from ...hardware.prices import public_prices
from ...hardware.slice import Slice
from ...runtime.versions import installed_versions
from ..readings import Reading
from ..runs.host_readings import newest_readings, share_of
from ..runs.records_table import as_number
from ..runs.run import Run, find_runs, is_run
from ..runs.summary import newest_records
from ..sources.host import HostSource
from ..sources.libtpu_grpc import ADDRESS as LIBTPU
from ..sources.libtpu_grpc import LibtpuSource
from ..sources.nvml import NvmlSource
from ..sources.protocol import Source
from ..sources.replay import replay
from ..stragglers.report import StragglerReport
from .fleet import Fleet
from .snapshot import Snapshot, Training

if TYPE_CHECKING:
    from ..scraping import ScrapedHost

RUNS = Path("runs")
SETTLE_S = 0.1  # between two looks at the CPUs, which count by hundredths of a second
LOSSES = 60
# Of all recorded readings together: many hosts get less each, and the screen is as quick.
FIRST_BYTES, NEWEST_BYTES = 2 << 20, 1 << 20
STRAGGLERS_EVERY_S = 10.0
CONNECT_S = 0.2


class Feed:
    """Makes snapshots.

    Args:
        run: A run directory, or a folder of some, of which the newest is taken; `runs/` by default.
        hosts: Run directories and addresses of Prometheus endpoints to read instead of this
            machine.
        recording: A readings.jsonl to show again instead of this machine.
        at_once: Whether only one snapshot is wanted: a recording is then shown as it ends.

    Raises:
        TPUValidationError: One of them is not there, or no address.
    """

    def __init__(
        self,
        run: Path | None = None,
        *,
        hosts: Sequence[str] = (),
        recording: Path | None = None,
        at_once: bool = False,
    ) -> None:
        self._here = detect_accelerators()
        self._fleet = Fleet()
        self._notes: list[str] = []
        self._sources: list[Source] = []
        self._scraped: list[ScrapedHost] = []
        self._runs: list[Run] = []
        self._recording = recording
        for host in hosts:
            if is_run(Path(host)):
                self._runs.append(Run(host))
            elif Path(host).exists():
                raise TPUValidationError(f"{host} is no run directory; name one, or host:port.")
            else:
                self._scraped.append(_scraped(host))
        if recording is not None:
            self._replay(recording, at_once=at_once)
        elif not hosts:
            self._sources = _sources_here(self._here)
            if not any(isinstance(one, LibtpuSource) for one in self._sources):
                self._notes.append(f"no process of this machine serves TPU metrics at {LIBTPU}")
        self._run = _training_run(run)
        if self._run is None and self._runs:
            self._run = self._runs[0]
        elif self._run is not None and not hosts and recording is None:
            self._runs.append(self._run)
        self._told = False
        self._stragglers: tuple[float, StragglerReport] | None = None
        self._versions = installed_versions("jax", "libtpu")

    def read(self) -> Snapshot:
        """Ask everyone now."""
        readings = [source.read() for source in self._sources]
        if not self._told and any(isinstance(one, HostSource) for one in self._sources):
            time.sleep(SETTLE_S)
            readings += [one.read() for one in self._sources if isinstance(one, HostSource)]
        if self._scraped:
            from ..scraping import scrape

            readings += scrape(self._scraped)
        self._fleet.take(self._recorded())
        self._fleet.take(self._as_process(one) for one in readings)
        self._told = True
        now = time.time()
        shown = max((one.time for one in readings), default=now) if self._recording else now
        hosts, silent = self._fleet.views(now=shown)
        training = None if self._run is None else self._train(self._run, now)
        notes = list(self._notes)
        if silent:
            notes.append(f"{silent} host{'s' * (silent != 1)} fell silent")
        if training is not None and training.summary.problem:
            notes.append(training.summary.problem)
        return Snapshot(
            time=shown,
            title=self._title(training),
            versions=self._versions,
            cost_per_hour=self._cost(training),
            hosts=tuple(hosts),
            training=training,
            notes=tuple(notes),
        )

    def close(self) -> None:
        """Let go of connections."""
        for source in self._sources:
            source.close()

    def _train(self, run: Run, now: float) -> Training:
        attempts = run.attempts()
        losses = [as_number(one.get("loss")) for one in newest_records(run.path)]
        last = attempts[-1] if attempts else None
        if self._stragglers is None or now - self._stragglers[0] >= STRAGGLERS_EVERY_S:
            self._stragglers = now, run.stragglers()
        return Training(
            run.summary(now=now),
            run.goodput(),
            self._stragglers[1],
            tuple(losses[-LOSSES:]),
            None if last is None else (now if last.reason is None else last.newest) - last.began,
        )

    def _replay(self, recording: Path, *, at_once: bool) -> None:
        try:
            self._sources = list(replay(recording, speed=float("inf") if at_once else 1.0))
        except (OSError, ValueError) as error:
            raise TPUValidationError(
                f"the recording {recording} cannot be read ({error}); name a readings.jsonl."
            ) from error
        if not self._sources:
            raise TPUValidationError(
                f"{recording} holds no readings; name a readings.jsonl that a monitor wrote."
            )
        if at_once:
            self._fleet.take(newest_readings(recording))

    def _recorded(self) -> list[Reading]:
        """What monitors wrote into run directories: a minute at first, then what is newest."""
        hosts = [(run, process) for run in self._runs for process in run.processes()]
        most = NEWEST_BYTES if self._told else FIRST_BYTES
        size = share_of(most, len(hosts))
        return [one for run, process in hosts for one in run.newest_readings(process, size)]

    def _as_process(self, reading: Reading) -> Reading:
        """Return a reading of this machine as one of the process of the run that is on it."""
        process = self._fleet.process_on(reading.host)
        return reading if process is None else dataclasses.replace(reading, process=process)

    def _title(self, training: Training | None) -> str:
        if training is not None and training.summary.device_kind:
            about = training.summary
            of = f"{about.chips} × {about.device_kind}" if about.chips else about.device_kind
            return f"{about.slice}, {of}" if about.slice else of
        return str(self._here)

    def _cost(self, training: Training | None) -> Figure | None:
        named = training.summary.slice if training is not None else None
        named = named or self._here.slice_name
        if named is None:
            return None
        try:
            return public_prices().cost_per_hour(Slice.parse(named))
        except TPUError as error:
            return Figure.missing("USD/h", str(error))


def _scraped(address: str) -> "ScrapedHost":
    from ..scraping import ScrapedHost  # loads what HTTP needs, which nothing else here does

    return ScrapedHost(address)


def _sources_here(here: Accelerators) -> list[Source]:
    """Return who is asked on this machine.

    Where no chip is seen, a container may hide it, so libtpu is asked if its port answers: to load
    gRPC only to be refused takes a fifth of the time of a screen.
    """
    sources: list[Source] = [HostSource()]
    if here.kind != "tpu":
        sources.append(NvmlSource())
    if here.kind == "tpu" or _answers(LIBTPU):
        sources.append(LibtpuSource())
    return sources


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_S):
            return True
    except OSError:
        return False


def _training_run(given: Path | None) -> Run | None:
    if given is not None and not given.exists():
        raise TPUValidationError(
            f"{given} is not there; name a run directory, or a folder of some."
        )
    found = find_runs(RUNS if given is None else given)
    if given is not None and not found:
        raise TPUValidationError(f"{given} holds no run; name a folder that `tpukit train` wrote.")
    return found[0] if found else None
