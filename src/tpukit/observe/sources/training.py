"""Figures of the training: from a run's files, from the user's own loop, from profile or check."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...plain_data import JsonMapping
from ...records.lines import is_number
from ...records.metrics import RunTail, RunTailReader, newest_run
from ...records.mirror import readable
from ...records.names import CHECK_FILE, METRICS_FILE, NOT_FINITE, STEP, TIME
from ..readings import RECORDED_AS, Reading, ReadingBuilder, Source

TRAINER_METRICS = (*RECORDED_AS, "tflops", "samples_per_second")
# A run without a record for this many seconds and steps is not running.
SILENT_S, SILENT_STEPS = 60.0, 20


class TrainerSource(Source):
    """Reads the newest step of metrics.jsonl; the reading has the step's time.

    Args:
        run_dir: The run; by default the newest one under runs/.
        process: Index of the process of the run.
        clock: A monotonic clock in seconds, to measure how long a run has been silent.
    """

    name = "trainer"

    def __init__(
        self,
        run_dir: str | Path | None = None,
        *,
        process: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given = None if run_dir is None else readable(run_dir)
        self._process, self._clock = process, clock
        self._reader: RunTailReader | None = None
        self._changed: tuple[tuple[int, int, int], float] | None = None

    def read(self) -> Reading:
        """Read the newest step; missing if the run has stopped writing."""
        builder = ReadingBuilder(self.name, TRAINER_METRICS, process=self._process)
        run = self._given or newest_run()
        if run is None:
            return builder.build(
                otherwise="there is no run under runs/; give run_dir, or call record_step of the "
                "monitor in a loop of your own"
            )
        try:
            if self._reader is None or self._reader.path != run:
                self._reader, self._changed = RunTailReader(run), None
            silent_s = self._silent_for(run / METRICS_FILE)
            tail = self._reader.read(steps=1)
        except OSError as error:
            return builder.build(
                otherwise=f"{run / METRICS_FILE} cannot be read ({error.strerror})"
            )
        if tail is None:
            return builder.build(otherwise=f"{run} has completed no step yet")
        if silent_s > max(SILENT_S, SILENT_STEPS * tail.newest_step_s):
            return builder.build(otherwise=f"{run} has written nothing for {silent_s:.0f} s")
        _add(builder, tail)
        at = tail.record.get(TIME)
        return builder.build(
            at=at if is_number(at) else None, otherwise=f"{run} does not record it"
        )

    def _silent_for(self, path: Path) -> float:
        """Return how long the file has not changed, by the monotonic clock."""
        about = path.stat()
        stamp = (about.st_ino, about.st_size, about.st_mtime_ns)
        now = self._clock()
        if self._changed is None:
            # The first look can only use the file's own time, which may be of another clock.
            self._changed = (stamp, now - max(0.0, time.time() - about.st_mtime))
        elif self._changed[0] != stamp:
            self._changed = (stamp, now)
        return now - self._changed[1]


def _add(builder: ReadingBuilder, tail: RunTail) -> None:
    not_finite = tail.record.get(NOT_FINITE)
    odd: dict[str, object] = not_finite if isinstance(not_finite, dict) else {}
    for metric, recorded in RECORDED_AS.items():
        value = tail.record.get(recorded)
        if is_number(value):
            builder.add(metric, value)
        elif recorded in odd:
            builder.lack(metric, f"it is {odd[recorded]} at step {tail.record.get(STEP)}")
    if tail.samples_per_s is not None:
        builder.add("samples_per_second", tail.samples_per_s)
    if tail.tflops is not None:
        builder.add("tflops", tail.tflops)
    else:
        builder.lack("tflops", "the FLOPs of this model's step are not known")


PROGRAM_METRICS = ("step", "step_time_seconds", "loss", "tflops", "samples_per_second")


@dataclass(frozen=True)
class _Step:
    number: int
    completed_at: float
    took_s: float | None
    loss: float | None
    flops: float | None
    samples: float | None


class ProgramSource(Source):
    """Keeps the newest step that the program recorded.

    Args:
        process: Index of the process of the run.
        clock: A monotonic clock in seconds.
    """

    name = "program"

    def __init__(self, *, process: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._process, self._clock = process, clock
        self._newest: _Step | None = None

    def record(
        self,
        step: int | None = None,
        *,
        loss: float | None = None,
        flops: float | None = None,
        samples: float | None = None,
    ) -> None:
        """Record a step that has completed now; its time is since the step before it.

        Args:
            step: Its number; the last one plus one by default.
            loss: Loss of the step.
            flops: Model FLOPs of the step over all chips.
            samples: Sequences in the step over all chips.
        """
        now, before = self._clock(), self._newest
        self._newest = _Step(
            number=step if step is not None else 1 if before is None else before.number + 1,
            completed_at=now,
            took_s=None if before is None else now - before.completed_at,
            loss=loss,
            flops=flops,
            samples=samples,
        )

    def read(self) -> Reading:
        """Return the newest step; missing if it is too long ago."""
        builder = ReadingBuilder(self.name, PROGRAM_METRICS, process=self._process)
        step = self._newest
        if step is None:
            return builder.build(otherwise="the program has recorded no step yet")
        silent_s = self._clock() - step.completed_at
        if silent_s > max(SILENT_S, SILENT_STEPS * (step.took_s or 0.0)):
            return builder.build(otherwise=f"the program has recorded no step for {silent_s:.0f} s")
        builder.add("step", step.number)
        if step.loss is not None:
            builder.add("loss", step.loss)
        if step.took_s:
            builder.add("step_time_seconds", step.took_s)
            if step.flops is not None:
                builder.add("tflops", step.flops / step.took_s / 1e12)
            if step.samples is not None:
                builder.add("samples_per_second", step.samples / step.took_s)
            return builder.build(otherwise="the program does not record it")
        return builder.build(otherwise="a second step is needed to know how long one takes")


OVERHEAD = "communication_overhead"
# Report files of a run directory's profiles; they are preferred to its check.
PROFILES = ("profile/report.json", "profile/*/report.json")


UNREADABLE = (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError)


class OverheadSource(Source):
    """Reads the share of communication from a run directory's profile or check.

    Args:
        run_dir: The run; by default the newest one under runs/.
        process: Index of the process of the run.
    """

    name = "profile"

    def __init__(self, run_dir: str | Path | None = None, *, process: int = 0) -> None:
        self._given = None if run_dir is None else readable(run_dir)
        self._process = process
        self._read: tuple[tuple[Path, int], float] | None = None

    def read(self) -> Reading:
        """Read the newest profile report, else the check; unchanged files are not read again."""
        builder = ReadingBuilder(self.name, [OVERHEAD], process=self._process)
        run = self._given or newest_run()
        if run is None:
            return builder.build(otherwise="there is no run under runs/; give run_dir")
        profiles = sorted(
            (path for pattern in PROFILES for path in run.glob(pattern)), key=_changed_at
        )
        candidates: list[tuple[Path, Callable[[Any], float]]] = [
            *((path, _measured_share) for path in reversed(profiles)),
            (run / CHECK_FILE, _predicted_share),
        ]
        for path, share_of in candidates:
            origin = "measured" if share_of is _measured_share else "model"
            try:
                builder.add(OVERHEAD, self._share(path, share_of), labels={"origin": origin})
            except FileNotFoundError:
                continue
            except UNREADABLE as error:
                builder.lack(OVERHEAD, f"{path} is no report that can be read ({error})")
                continue
            return builder.build()
        return builder.build(
            otherwise=f"{run} has no profile and no check.json; profile a few steps"
        )

    def _share(self, path: Path, share_of: Callable[[Any], float]) -> float:
        key = (path, path.stat().st_mtime_ns)
        if self._read is None or self._read[0] != key:
            self._read = (key, share_of(json.loads(path.read_text(encoding="utf-8"))))
        return self._read[1]


def _measured_share(report: JsonMapping) -> float:
    return float(report["analysis"]["communication_bound"])


def _predicted_share(report: JsonMapping) -> float:
    """Return a check's predicted share of time in which a core waits for other chips and slices."""
    prediction = report["prediction"]
    waited = prediction["seconds_by_cause"]
    return (float(waited["ici"]) + float(waited["dcn"])) / float(prediction["step_time_s"])


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
