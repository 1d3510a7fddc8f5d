"""Replay a recorded readings.jsonl at the pace it was written."""

import bisect
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from ..readings import Reading, ReadingBuilder, parse_readings


class ReplaySource:
    """Replays the readings of one source of a recording.

    Args:
        path: A readings.jsonl.
        source: The source to replay; the first one by default.
        speed: 2 replays twice as fast; infinity returns the last reading at once.
        clock: A clock in seconds.
    """

    name = "replay"

    def __init__(
        self,
        path: str | Path,
        *,
        source: str | None = None,
        speed: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self._of, self._speed, self._clock = Path(path), source, speed, clock
        self._began: float | None = None
        self._readings: list[Reading] = []
        self._stamp: tuple[int, int, int] | None = None

    def read(self) -> Reading:
        """Return the newest reading that is due, with its recorded time."""
        try:
            self._load()
        except OSError as error:
            return self._missing(f"the recording {self.path} cannot be read ({error.strerror})")
        if not self._readings:
            what = f"no reading of {self._of!r}" if self._of else "no reading"
            return self._missing(f"the recording {self.path} contains {what}")
        now = self._clock()
        if self._began is None:
            self._began = now
        # Avoids 0 · infinity at the first reading, which is NaN.
        passed = (now - self._began) * self._speed if now > self._began else 0.0
        passed = float("inf") if self._speed == float("inf") else passed
        first = self._readings[0].time
        times = [reading.time - first for reading in self._readings]
        index = bisect.bisect_right(times, passed)
        return self._readings[max(0, index - 1)]

    def close(self) -> None:
        """Discard the recording."""
        self._readings, self._stamp, self._began = [], None, None

    def _load(self) -> None:
        about = self.path.stat()
        stamp = (about.st_ino, about.st_size, about.st_mtime_ns)
        if stamp == self._stamp:
            return
        readings = [
            reading
            for reading in read_readings(self.path)
            if self._of is None or reading.source == self._of
        ]
        if readings and self._of is None:
            readings = [reading for reading in readings if reading.source == readings[0].source]
        self._readings = sorted(readings, key=lambda reading: reading.time)
        self._stamp = stamp

    def _missing(self, reason: str) -> Reading:
        self._stamp = None
        metrics = {sample.metric for reading in self._readings for sample in reading.samples}
        wanted = sorted(metrics) or ["readings"]
        reading = ReadingBuilder(self._of or self.name, wanted).build(otherwise=reason)
        return dataclasses.replace(reading, source=self._of or self.name)


def replay(path: str | Path, *, speed: float = 1.0) -> list[ReplaySource]:
    """Return a `ReplaySource` for each source in a recording."""
    names = dict.fromkeys(reading.source for reading in read_readings(Path(path)))
    return [ReplaySource(path, source=name, speed=speed) for name in names]


def read_readings(path: Path) -> list[Reading]:
    """Return the readings in a readings.jsonl; damaged and incomplete lines are skipped."""
    return parse_readings(path.read_bytes().splitlines())
