"""The trainer's own records: the newest step in a run's metrics.jsonl."""

import time
from collections.abc import Callable
from pathlib import Path

from ...runtime.run_files import METRICS_FILE
from ...runtime.run_tail import RunTail, RunTailReader, is_number, newest_run
from ..readings import Reading, ReadingBuilder

# What the record calls each.
RECORDED = {
    "step": "step",
    "step_time_seconds": "step_time_s",
    "loss": "loss",
    "tokens_per_second_per_chip": "tokens_per_s_per_chip",
    "mfu": "mfu",
    "input_stall_seconds": "input_stall_s",
}
WANTED = (*RECORDED, "tflops", "samples_per_second")
# A run that has written nothing for this long, or for this many of its steps, is not running.
SILENT_S, SILENT_STEPS = 60.0, 20


class TrainerSource:
    """Reads the end of metrics.jsonl; its reading has the time at which the step was recorded.

    Args:
        run_dir: The run; by default the one under runs/ that was written last, looked for anew
            until there is one.
        process: Index of the process of the run.
        clock: Seconds that only go forward, to tell how long a run has been silent.
    """

    name = "trainer"

    def __init__(
        self,
        run_dir: str | Path | None = None,
        *,
        process: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given = None if run_dir is None else Path(run_dir)
        self._process, self._clock = process, clock
        self._reader: RunTailReader | None = None
        self._changed: tuple[tuple[int, int, int], float] | None = None

    def read(self) -> Reading:
        """Read the newest step, unless the run has stopped writing."""
        found = ReadingBuilder(self.name, WANTED, process=self._process)
        run = self._given or newest_run()
        if run is None:
            return found.build(
                otherwise="there is no run under runs/; give run_dir, or call record_step of the "
                "monitor in a loop of your own"
            )
        try:
            if self._reader is None or self._reader.path != run:
                self._reader, self._changed = RunTailReader(run), None
            silent_s = self._silent_for(run / METRICS_FILE)
            tail = self._reader.read(steps=1)
        except OSError as error:
            return found.build(otherwise=f"{run / METRICS_FILE} cannot be read ({error.strerror})")
        if tail is None:
            return found.build(otherwise=f"{run} has completed no step yet")
        if silent_s > max(SILENT_S, SILENT_STEPS * tail.step_time_s):
            return found.build(otherwise=f"{run} has written nothing for {silent_s:.0f} s")
        _add(found, tail)
        at = tail.record.get("time")
        return found.build(at=at if is_number(at) else None, otherwise=f"{run} does not record it")

    def close(self) -> None:
        """Do nothing: the file is opened for each reading."""

    def _silent_for(self, path: Path) -> float:
        """Return how long the file has not changed, by a clock that does not jump."""
        about = path.stat()
        stamp = (about.st_ino, about.st_size, about.st_mtime_ns)
        now = self._clock()
        if self._changed is None:
            # Seen for the first time: only its own time can tell, which may be of another clock.
            self._changed = (stamp, now - max(0.0, time.time() - about.st_mtime))
        elif self._changed[0] != stamp:
            self._changed = (stamp, now)
        return now - self._changed[1]


def _add(found: ReadingBuilder, tail: RunTail) -> None:
    said = tail.record.get("not_finite")
    odd: dict[str, object] = said if isinstance(said, dict) else {}
    for metric, recorded in RECORDED.items():
        value = tail.record.get(recorded)
        if is_number(value):
            found.add(metric, value)
        elif recorded in odd:
            found.lack(metric, f"it is {odd[recorded]} at step {tail.record.get('step')}")
    if tail.samples_per_s is not None:
        found.add("samples_per_second", tail.samples_per_s)
    if tail.tflops is not None:
        found.add("tflops", tail.tflops)
    else:
        found.lack("tflops", "the FLOPs of this model's step are not known")
