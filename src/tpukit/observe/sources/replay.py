"""A recorded readings.jsonl, told again at the pace it was written."""

import bisect
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

from ...runtime.run_tail import is_number
from ..readings import Reading, ReadingBuilder


class ReplaySource:
    """Gives the readings of one source of a recording, in their time.

    Args:
        path: A readings.jsonl.
        source: Which of the sources that it holds; the first by default.
        speed: 2 replays twice as fast; infinite gives the last reading at once.
        clock: What tells the time, in seconds.
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
        """Return the newest reading whose time has come; it keeps its recorded time."""
        try:
            self._load()
        except OSError as error:
            return self._missing(f"the recording {self.path} cannot be read ({error.strerror})")
        if not self._readings:
            what = f"no reading of {self._of!r}" if self._of else "no reading"
            return self._missing(f"the recording {self.path} holds {what}")
        now = self._clock()
        if self._began is None:
            self._began = now
        # Not 0 · infinity at the first reading, which is no number.
        passed = (now - self._began) * self._speed if now > self._began else 0.0
        passed = float("inf") if self._speed == float("inf") else passed
        first = self._readings[0].time
        index = bisect.bisect_right(self._readings, passed, key=lambda one: one.time - first)
        return self._readings[max(0, index - 1)]

    def close(self) -> None:
        """Forget the recording."""
        self._readings, self._stamp, self._began = [], None, None

    def _load(self) -> None:
        about = self.path.stat()
        stamp = (about.st_ino, about.st_size, about.st_mtime_ns)
        if stamp == self._stamp:
            return
        found = [
            one for one in read_readings(self.path) if self._of is None or one.source == self._of
        ]
        if found and self._of is None:
            found = [one for one in found if one.source == found[0].source]
        self._readings = sorted(found, key=lambda one: one.time)
        self._stamp = stamp

    def _missing(self, reason: str) -> Reading:
        self._stamp = None
        known = {sample.metric for one in self._readings for sample in one.samples}
        wanted = sorted(known) or ["readings"]
        reading = ReadingBuilder(self._of or self.name, wanted).build(otherwise=reason)
        return dataclasses.replace(reading, source=self._of or self.name)


def replay(path: str | Path, *, speed: float = 1.0) -> list[ReplaySource]:
    """Return a source for each source that a recording holds."""
    names = dict.fromkeys(one.source for one in read_readings(Path(path)))
    return [ReplaySource(path, source=name, speed=speed) for name in names]


def read_readings(path: Path) -> list[Reading]:
    """Read a readings.jsonl; lines that are damaged, or not yet whole, are passed over."""
    readings: list[Reading] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                reading = Reading.from_dict(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue
            if is_number(reading.time) and all(is_number(one.value) for one in reading.samples):
                readings.append(reading)
    return readings
