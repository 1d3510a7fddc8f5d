"""Readings written to files: JSON lines beside the run, and TensorBoard scalars."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from ...errors import MissingExtraError, TPUValidationError
from ...records.names import HOST_READINGS_FILE, HOSTS_FOLDER
from ...runtime.object_store import is_address
from ..readings import Reading

EVERY_S, REPEAT_S = 10.0, 60.0


class JsonlExporter:
    """Appends readings as JSON lines, one round per interval.

    A reading equal to the one before it is written again only after a minute. Otherwise a source
    that is gone would fill the disk with its reason.

    Args:
        run_dir: The run's folder.
        process: Index of this host's process.
        every_s: Seconds between two written rounds; with one per second, the file would grow by 150
            MB per day.
        clock: A monotonic clock in seconds.

    Raises:
        TPUValidationError: `run_dir` is an address.
    """

    name = HOST_READINGS_FILE

    def __init__(
        self,
        run_dir: str | Path,
        *,
        process: int = 0,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if is_address(run_dir):
            raise TPUValidationError(
                f"expected a local folder for readings, but got {run_dir}; a monitor of "
                "`tpukit train` sends them there with the run's other files."
            )
        self.path = Path(run_dir) / HOSTS_FOLDER / str(process) / HOST_READINGS_FILE
        self._every_s, self._clock = every_s, clock
        self._kept_at: float | None = None
        self._left_out: Sequence[Reading] = ()
        self._file: TextIO | None = None
        self._written: dict[str, tuple[Reading, float]] = {}
        self._is_cut = False

    def export(self, readings: Sequence[Reading]) -> None:
        """Append the readings if `every_s` has passed.

        Raises:
            OSError: The disk is full, or the folder cannot be written. The next call tries again.
        """
        now = self._clock()
        if self._kept_at is not None and now - self._kept_at < self._every_s:
            self._left_out = readings
        else:
            self._append(readings, now)

    def close(self) -> None:
        """Append the last round if it is not written yet, and close the file."""
        try:
            self._append(self._left_out, self._clock())
        finally:
            self._let_go()

    def _append(self, readings: Sequence[Reading], now: float) -> None:
        due = [reading for reading in readings if self._is_news(reading, now)]
        lines = [json.dumps(reading.to_dict(), separators=(",", ":")) + "\n" for reading in due]
        if lines:
            # Half a line may have been written when the disk was full; end it, so that readers skip
            # it.
            text = ("\n" if self._is_cut else "") + "".join(lines)
            try:
                file = self._open()
                file.write(text)
                file.flush()
            except OSError:
                self._is_cut = True
                self._let_go()
                raise
        self._is_cut, self._kept_at, self._left_out = False, now, ()
        for reading in due:
            self._written[reading.source] = (reading, now)

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                return  # unwritten data is lost, and was reported by the failed write

    def _open(self) -> TextIO:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        return self._file

    def _is_news(self, reading: Reading, now: float) -> bool:
        before = self._written.get(reading.source)
        if before is None or now - before[1] >= REPEAT_S:
            return True
        old = before[0]
        return (old.samples, old.missing) != (reading.samples, reading.missing)


class TensorBoardExporter:
    """Writes every number under `monitor/<metric>`, one series per chip; steps are seconds.

    Args:
        log_dir: Folder of the event file.

    Raises:
        MissingExtraError: tensorboardX is not installed.
    """

    name = "tensorboard"

    def __init__(self, log_dir: str | Path) -> None:
        try:
            import tensorboardX
        except ImportError:
            raise MissingExtraError(
                "tensorboard", needed_for="the TensorBoard exporter", module="tensorboardX"
            ) from None
        self._writer: Any = tensorboardX.SummaryWriter(str(log_dir))
        self._began: float | None = None

    def export(self, readings: Sequence[Reading]) -> None:
        """Add the numbers."""
        for reading in readings:
            if self._began is None:
                self._began = reading.time
            step = max(0, round(reading.time - self._began))
            for sample in reading.samples:
                parts = [sample.metric, *sample.labels.values()]
                if sample.chip is not None:
                    parts.append(f"chip {sample.chip}")
                tag = f"monitor/{'/'.join(parts)}"
                self._writer.add_scalar(tag, sample.value, step, walltime=reading.time)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
