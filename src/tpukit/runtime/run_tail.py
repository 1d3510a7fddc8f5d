"""The end of a run's records: the newest run, and what its last step was like.

Runs are written by rooms below; a configuration, which stands above them, asks here.
"""

import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

from ..plain_data import read_json
from .run_files import EVENTS_FILE, IDENTITY_FILE, METRICS_FILE

RUNS = "runs"
# A record takes a few hundred bytes; one that is far longer is looked for further up.
TAIL_BYTES = (8 * 1024, 1024 * 1024)
_MOST = sys.float_info.max
LATEST = 2.0**36  # unix seconds: the year 4147
RECENT = 32
"""Steps that count as now, where one alone would be noisy."""


@dataclass(frozen=True, kw_only=True)
class RunTail:
    """The newest completed step of a run.

    Attributes:
        path: The run directory.
        records: The last lines of metrics.jsonl that are of steps, the newest first.
        batch_size: Sequences a step, of all chips together; None where run.json does not say.
        flops_per_step: Of the model, of all chips together; None where no attempt says.
    """

    path: Path
    records: tuple[Mapping[str, Any], ...]
    batch_size: int | None = None
    flops_per_step: float | None = None

    @property
    def record(self) -> Mapping[str, Any]:
        """The newest step."""
        return self.records[0]

    @property
    def step_time_s(self) -> float:
        """Wall time of the newest step."""
        return float(self.record["step_time_s"])

    def median(self, name: str) -> float | None:
        """Return the median of a figure over the last steps; None where none recorded it."""
        values = [one[name] for one in self.records if is_number(one.get(name))]
        return statistics.median(values) if values else None

    @property
    def samples_per_s(self) -> float | None:
        """Sequences a second, of all chips together."""
        return _rate(self.batch_size, self.step_time_s)

    @property
    def tflops(self) -> float | None:
        """Model TFLOP/s of all chips together."""
        rate = _rate(self.flops_per_step, self.step_time_s)
        return None if rate is None else rate / 1e12


def newest_run(folder: str | Path = RUNS) -> Path | None:
    """Return the run directory whose metrics were written last, or None."""
    files = [*Path(folder).glob(f"*/{METRICS_FILE}")]
    newest = max(files, key=_written_at, default=None)
    return None if newest is None else newest.parent


def read_tail(run_dir: str | Path, *, steps: int = RECENT) -> RunTail | None:
    """Return the newest completed steps of a run; None before the first.

    Args:
        run_dir: The run.
        steps: How many at most.

    Raises:
        OSError: The run has no metrics.jsonl, or it cannot be read.
    """
    return RunTailReader(run_dir).read(steps=steps)


class RunTailReader:
    """Reads the end of a run again and again, and each event of it once.

    Args:
        run_dir: The run.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir)
        self._batch_size: int | None = None
        self._events: tuple[int, int] = (0, 0)  # which file, and how much of it was read
        self._flops_per_step: float | None = None

    def read(self, *, steps: int = RECENT) -> RunTail | None:
        """Return the newest completed steps; None before the first.

        Raises:
            OSError: There is no metrics.jsonl, or it cannot be read.
        """
        records: tuple[Mapping[str, Any], ...] = ()
        for most_bytes in TAIL_BYTES:
            lines = _last_lines(self.path / METRICS_FILE, most_bytes)
            timed = (one for one in lines if is_number(one.get("step_time_s")))
            records = tuple(itertools.islice(timed, steps))
            if len(records) == steps:
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
            return  # it is what makes the run this run, and stays
        try:
            size = read_json(self.path / IDENTITY_FILE)["identity"]["batch_size"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        self._batch_size = size if type(size) is int else None

    def _read_events(self) -> None:
        """Find the newest attempt's FLOPs: another may have had another batch."""
        path = self.path / EVENTS_FILE
        try:
            about = path.stat()
            file_id, seen = self._events
            if about.st_ino != file_id or about.st_size < seen:
                seen, self._flops_per_step = 0, None
            if about.st_size == seen:
                return
            with path.open("rb") as file:
                file.seek(seen)
                new = file.read()
        except OSError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._events = (about.st_ino, seen + len(whole))
        for event in _objects(whole.split(b"\n")):
            if event.get("event") == "attempt started":
                flops = event.get("flops_per_step")
                self._flops_per_step = float(flops) if is_number(flops) else None


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a record is a finite number, as those that were written all are."""
    if type(value) is float or type(value) is int:
        return -_MOST <= value <= _MOST
    return False


def is_time(value: object) -> TypeGuard[float]:
    """Whether a value of a record is a time in unix seconds that a calendar has."""
    return is_number(value) and 0 <= value < LATEST


def _rate(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or seconds <= 0 else amount / seconds


def _last_lines(path: Path, most_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects at the end of a file, the last first; a line half written waits."""
    with path.open("rb") as file:
        begin = max(0, file.seek(0, 2) - most_bytes)
        file.seek(begin)
        lines = file.read().split(b"\n")
    # The first may have been cut by where the reading began, the last by its writer.
    yield from _objects(reversed(lines[1 if begin else 0 : -1]))


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the lines that are JSON objects."""
    for line in lines:
        try:
            found: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield cast("dict[str, Any]", found)


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # deleted since it was listed
        return 0.0
