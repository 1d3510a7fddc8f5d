"""The end of a run's records: the newest run, and what its last step was like.

Runs are written by rooms below; a configuration, which stands above them, asks here.
"""

import itertools
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

RUNS = "runs"
METRICS, EVENTS, IDENTITY = "metrics.jsonl", "events.jsonl", "run.json"
TAIL_BYTES = 64 * 1024
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
        values = [one[name] for one in self.records if isinstance(one.get(name), int | float)]
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
    files = [*Path(folder).glob(f"*/{METRICS}")]
    newest = max(files, key=_written_at, default=None)
    return None if newest is None else newest.parent


def read_tail(run_dir: str | Path) -> RunTail | None:
    """Return the newest completed step of a run; None before the first.

    Raises:
        OSError: The run has no metrics.jsonl, or it cannot be read.
    """
    path = Path(run_dir)
    steps = (
        one
        for one in _last_lines(path / METRICS)
        if isinstance(one.get("step_time_s"), int | float)
    )
    records = tuple(itertools.islice(steps, RECENT))
    if not records:
        return None
    return RunTail(
        path=path,
        records=records,
        batch_size=_batch_size(path),
        flops_per_step=_flops_per_step(path),
    )


def _rate(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or seconds <= 0 else amount / seconds


def _batch_size(path: Path) -> int | None:
    try:
        size = json.loads((path / IDENTITY).read_text())["identity"]["batch_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return size if type(size) is int else None


def _flops_per_step(path: Path) -> float | None:
    """Of the newest attempt: another may have had another batch."""
    try:
        for event in _last_lines(path / EVENTS):
            if event.get("event") == "attempt started":
                flops = event.get("flops_per_step")
                return float(flops) if isinstance(flops, int | float) else None
    except OSError:
        return None
    return None


def _last_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects at the end of a file, the last first; a line half written waits."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        begin = max(0, size - TAIL_BYTES)
        file.seek(begin)
        lines = file.read().split(b"\n")
    # The first may have been cut by where the reading began, the last by its writer.
    for line in reversed(lines[1 if begin else 0 : -1]):
        try:
            found: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield cast("dict[str, Any]", found)


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # deleted since it was listed
        return 0.0
