"""The screen's figures from this machine, a run directory, other hosts or a recording; and keys."""

import contextlib
import dataclasses
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from ...errors import TPUError, TPUValidationError
from ...hardware.detect import Accelerators, detect_accelerators
from ...hardware.figure import Figure
from ...hardware.prices import public_prices
from ...hardware.slice import Slice
from ...runtime.interruption import undone_if_interrupted
from ...runtime.object_store import is_address
from ...runtime.versions import installed_versions
from ..readings import Reading, Source
from ..runs.host_readings import newest_readings, share_of
from ..runs.run import Run, find_runs, is_run
from ..runs.series import as_number
from ..runs.summary import newest_records
from ..sources.libtpu_grpc import ADDRESS as LIBTPU
from ..sources.libtpu_grpc import LibtpuSource
from ..sources.machine import HostSource, NvmlSource
from ..sources.replay import replay
from ..stragglers.comparison import StragglerReport
from .fleet import Fleet, Snapshot, Training
from .screen import Screen, View

if TYPE_CHECKING:
    from ..sources.prometheus import ScrapedHost

RUNS = Path("runs")
SETTLE_S = 0.1  # between two CPU readings, which count hundredths of a second
LOSSES = 60
# Bytes of recorded readings in total; with many hosts, fewer per host.
FIRST_BYTES, NEWEST_BYTES = 2 << 20, 1 << 20
STRAGGLERS_EVERY_S = 10.0
CONNECT_S = 0.2


class Feed:
    """Makes snapshots.

    Args:
        run: A run directory, or a folder whose newest run is shown, also gs://…; by default
            `runs/`.
        hosts: Run directories and addresses of Prometheus endpoints to read instead of this
            machine.
        recording: A readings.jsonl to replay instead of this machine.
        at_once: Whether only one snapshot is taken; a recording is then shown at its end.

    Raises:
        TPUValidationError: A path does not exist, or an address is not valid.
    """

    def __init__(
        self,
        run: str | Path | None = None,
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
            if is_address(host) or is_run(Path(host)):
                self._runs.append(Run(host))
            elif Path(host).exists():
                raise TPUValidationError(f"{host} is no run directory; name one, or host:port.")
            else:
                self._scraped.append(_scraped(host))
        if recording is not None:
            self._replay(recording, at_once=at_once)
        elif not hosts:
            self._sources = _sources_here(self._here)
            if not any(isinstance(source, LibtpuSource) for source in self._sources):
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
        """Read all sources now."""
        readings = [source.read() for source in self._sources]
        if not self._told and any(isinstance(source, HostSource) for source in self._sources):
            time.sleep(SETTLE_S)
            readings += [
                source.read() for source in self._sources if isinstance(source, HostSource)
            ]
        if self._scraped:
            from ..sources.prometheus import scrape

            readings += scrape(self._scraped)
        self._fleet.take(self._recorded())
        self._fleet.take(self._as_process(reading) for reading in readings)
        self._told = True
        now = time.time()
        shown = max((reading.time for reading in readings), default=now) if self._recording else now
        hosts, silent = self._fleet.views(now=shown)
        training = None if self._run is None else self._train(self._run, now)
        notes = list(self._notes)
        if silent:
            notes.append(f"{silent} host{'s' * (silent != 1)} stopped reporting")
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
        """Close connections."""
        for source in self._sources:
            source.close()

    def _train(self, run: Run, now: float) -> Training:
        attempts = run.attempts()
        losses = [as_number(record.get("loss")) for record in newest_records(run.path)]
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
                f"{recording} contains no readings; name a readings.jsonl that a monitor wrote."
            )
        if at_once:
            self._fleet.take(newest_readings(recording))

    def _recorded(self) -> list[Reading]:
        """Return readings from run directories: the last minute at first, then the newest."""
        hosts = [(run, process) for run in self._runs for process in run.processes()]
        most = NEWEST_BYTES if self._told else FIRST_BYTES
        size = share_of(most, len(hosts))
        return [reading for run, process in hosts for reading in run.newest_readings(process, size)]

    def _as_process(self, reading: Reading) -> Reading:
        """Return a reading of this machine with the index of the run's process on it."""
        process = self._fleet.process_on(reading.host)
        return reading if process is None else dataclasses.replace(reading, process=process)

    def _title(self, training: Training | None) -> str:
        if training is not None and training.summary.device_kind:
            about = training.summary
            chips = f"{about.chips} × {about.device_kind}" if about.chips else about.device_kind
            return f"{about.slice}, {chips}" if about.slice else chips
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
    from ..sources.prometheus import (
        ScrapedHost,  # loads HTTP modules, which nothing else here needs
    )

    return ScrapedHost(address)


def _sources_here(here: Accelerators) -> list[Source]:
    """Return the sources for this machine.

    A container may hide a chip, so libtpu is also read where its port answers. The port is tried
    first, because loading gRPC takes a fifth of the time of a screen.
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


def _training_run(given: str | Path | None) -> Run | None:
    if given is not None and not is_address(given) and not Path(given).exists():
        raise TPUValidationError(
            f"{given} does not exist; name a run directory, or a folder of runs."
        )
    runs = find_runs(RUNS if given is None else given)
    if given is not None and not runs:
        raise TPUValidationError(
            f"{given} contains no run; name a folder that `tpukit train` wrote."
        )
    return runs[0] if runs else None


VIEWS: dict[str, View] = {"c": "chips", "h": "hosts", "r": "rolled up"}
ESCAPE = "\x1b"


@dataclass(frozen=True)
class PressedKeys:
    """The choices made by keys."""

    view: View = "auto"
    by_duty: bool = False
    help: bool = False
    quit: bool = False

    def press(self, key: str) -> "PressedKeys":
        """Return the choices after a key; the same view's key again returns to "auto"."""
        if key in ("q", "Q", "\x04"):
            return replace(self, quit=True)
        if key in VIEWS:
            return replace(self, view="auto" if self.view == VIEWS[key] else VIEWS[key])
        if key == "s":
            return replace(self, by_duty=not self.by_duty)
        return replace(self, help=key == "?" and not self.help)


def watch(feed: Feed, *, rate_s: float, console: Console) -> None:
    """Show snapshots until q is pressed."""
    keys = PressedKeys()
    with (
        single_keys() as next_key,
        Live(console=console, screen=True, auto_refresh=False) as live,
        undone_if_interrupted(live.stop),
    ):
        while not keys.quit:
            snapshot = feed.read()
            due = time.monotonic() + rate_s
            while True:
                live.update(
                    Screen(snapshot, keys.view, console.height, keys.by_duty, keys.help),
                    refresh=True,
                )
                key = next_key(max(0.0, due - time.monotonic()))
                if key is None:
                    break
                keys = keys.press(key)
                if keys.quit:
                    break


@contextlib.contextmanager
def single_keys() -> Generator[Callable[[float], str | None]]:
    """Read single keys without echo; none without a terminal."""
    if not sys.stdin.isatty():
        yield _wait
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def restore() -> None:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)

    def next_key(timeout_s: float) -> str | None:
        if not select.select([terminal], [], [], timeout_s)[0]:
            return None
        key = os.read(terminal, 32).decode(errors="replace")
        if not key:
            time.sleep(timeout_s)  # the terminal is gone: do not spin
            return None
        return ESCAPE if key.startswith(ESCAPE) else key[0]

    with undone_if_interrupted(restore):
        try:
            tty.setcbreak(terminal)
            yield next_key
        finally:
            restore()


def _wait(timeout_s: float) -> str | None:
    time.sleep(timeout_s)
    return None
