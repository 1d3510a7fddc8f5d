"""`metrics.jsonl`: one JSON object per line, each step once, and the newest figures of a run.

A resume or rollback to a step removes the lines after it, which are then written again. So the file
always reads as one run without interruptions; `train.log` reports what happened.
"""

import contextlib
import itertools
import json
import math
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import TPUValidationError
from ..hardware.missing import Measured
from ..plain_data import JsonMapping, JsonObject, read_json
from ..runtime.files import write_bytes
from .events import ATTEMPT_STARTED, read_events
from .lines import AppendedLines, is_number, iter_records, parse_lines, read_end
from .mirror import address_of, readable
from .names import EVENTS_FILE, IDENTITY_FILE, METRICS_FILE, NOT_FINITE, STEP, STEP_TIME


class MetricsFile:
    """Appends records to a JSON-lines file.

    Args:
        path: The file; it is made if it does not exist.
        after_step: The last step whose record is kept.
    """

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        self.path = path
        self._lines = AppendedLines(path)
        self.roll_back(after_step)

    def write(self, record: JsonMapping) -> None:
        """Append one record; NaN and infinity become null and are listed in `not_finite`."""
        odd = [name for name, value in record.items() if _is_odd(value)]
        line = {name: None if name in odd else value for name, value in record.items()}
        if odd:
            line[NOT_FINITE] = {name: str(record[name]) for name in odd}
        self._lines.write(json.dumps(line, ensure_ascii=False) + "\n")

    def roll_back(self, step: int) -> None:
        """Remove the records after `step`, and a last line that was cut short."""
        self._lines.close()
        with contextlib.suppress(OSError):  # a full disk, on which lines wait
            self.path.touch(mode=0o600)
        if not self.path.is_file():
            return
        kept = b"".join(line for line, record in _read(self.path) if record.get(STEP, 0) <= step)
        if self.path.read_bytes().startswith(kept):
            os.truncate(self.path, len(kept))  # a full disk has no room for a second file
        else:
            write_bytes(self.path, kept, private=True)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_metrics(path: str | Path) -> list[JsonObject]:
    """Return the records of a metrics file, or of the run directory or address that has one.

    Raises:
        TPUValidationError: The file does not exist.
    """
    file = readable(path)
    file = file / METRICS_FILE if file.is_dir() else file
    if not file.is_file():
        raise TPUValidationError(
            f"{address_of(file)} does not exist; name a run directory or its {METRICS_FILE}."
        )
    return [record for _, record in _read(file)]


def read_steps(path: str | Path) -> list[JsonObject]:
    """Return the records of training steps, without those of evaluations.

    Raises:
        TPUValidationError: The metrics file does not exist.
    """
    return [record for record in read_metrics(path) if record.get(STEP_TIME) is not None]


def _read(path: Path) -> Iterator[tuple[bytes, JsonObject]]:
    with path.open("rb") as file:
        yield from iter_records(file)


def _is_odd(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


RUNS = "runs"
# A record takes a few hundred bytes; the second size is for records that are far longer.
TAIL_BYTES = (8 * 1024, 1024 * 1024)
RECENT = 32
"""Number of last steps for a median, because a single step is noisy."""

Provider = Callable[[], Mapping[str, Measured]]
_LOCK = threading.Lock()
_PROVIDERS: list[Provider] = []


@dataclass(frozen=True, kw_only=True)
class RunTail:
    """The newest completed steps of a run.

    Attributes:
        path: The run directory.
        records: The last records of steps, the newest first.
        batch_size: Sequences per step, over all chips; None where run.json does not contain it.
        flops_per_step: Model FLOPs over all chips; None where no attempt recorded them.
    """

    path: Path
    records: tuple[JsonMapping, ...]
    batch_size: int | None = None
    flops_per_step: float | None = None

    @property
    def record(self) -> JsonMapping:
        """The newest step."""
        return self.records[0]

    @property
    def newest_step_s(self) -> float:
        """Wall time of the newest step."""
        return float(self.record[STEP_TIME])

    def median(self, name: str) -> float | None:
        """Return the median of a figure over the last steps; None where no step recorded it."""
        values = [record[name] for record in self.records if is_number(record.get(name))]
        return statistics.median(values) if values else None

    @property
    def samples_per_s(self) -> float | None:
        """Sequences per second, over all chips."""
        return _rate(self.batch_size, self.newest_step_s)

    @property
    def tflops(self) -> float | None:
        """Model TFLOP/s over all chips."""
        rate = _rate(self.flops_per_step, self.newest_step_s)
        return None if rate is None else rate / 1e12


class RunTailReader:
    """Reads the end of a run repeatedly; unchanged files are not read again.

    Args:
        run_dir: The run.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir)
        self._batch_size: int | None = None
        self._events_stamp: tuple[int, int] | None = None
        self._flops_per_step: float | None = None

    def read(self, *, steps: int = RECENT) -> RunTail | None:
        """Return at most `steps` of the newest completed steps; None before the first.

        Raises:
            OSError: metrics.jsonl does not exist or cannot be read.
        """
        records: tuple[JsonMapping, ...] = ()
        for size in TAIL_BYTES:
            lines, is_all = read_end(self.path / METRICS_FILE, size)
            newest_first = (record for record in reversed(parse_lines(lines)) if record)
            timed = (record for record in newest_first if is_number(record.get(STEP_TIME)))
            records = tuple(itertools.islice(timed, steps))
            if is_all or len(records) == steps:
                break
        if not records:
            return None
        self._read_identity()
        self._read_events()
        return RunTail(
            path=self.path,
            records=records,
            batch_size=self._batch_size,
            flops_per_step=self._flops_per_step,
        )

    def _read_identity(self) -> None:
        if self._batch_size is not None:
            return  # the identity of a run never changes
        try:
            size = read_json(self.path / IDENTITY_FILE)["identity"]["batch_size"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        self._batch_size = size if type(size) is int else None

    def _read_events(self) -> None:
        """Find the FLOPs of the newest attempt, because attempts may differ in their batch."""
        path = self.path / EVENTS_FILE
        try:
            about = path.stat()
        except OSError:
            return
        stamp = about.st_ino, about.st_size
        if stamp == self._events_stamp:
            return
        self._events_stamp = stamp
        for event in read_events(path):
            if event.event == ATTEMPT_STARTED:
                self._flops_per_step = event.number("flops_per_step")


def newest_run(folder: str | Path = RUNS) -> Path | None:
    """Return the run directory whose metrics were written last, or None."""
    files = [*Path(folder).glob(f"*/{METRICS_FILE}")]
    newest = max(files, key=_modified_at, default=None)
    return None if newest is None else newest.parent


def publish(provider: Provider) -> None:
    """Offer a monitor's measurements until they are withdrawn; the newest offer is used."""
    with _LOCK:
        _PROVIDERS.append(provider)


def withdraw(provider: Provider) -> None:
    """End an offer of measurements."""
    with _LOCK:
        if provider in _PROVIDERS:
            _PROVIDERS.remove(provider)


def current_measurements() -> Mapping[str, Measured] | None:
    """Return the measurements of this process's monitor; None without one."""
    with _LOCK:
        provider = _PROVIDERS[-1] if _PROVIDERS else None
    return None if provider is None else provider()


def _rate(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or seconds <= 0 else amount / seconds


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # deleted since it was listed
        return 0.0
