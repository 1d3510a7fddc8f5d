"""`hosts/<process>/readings.jsonl`: what monitors said of each host's chips, newest and history."""

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...records.lines import read_end
from ...runtime.run_tail import is_number, is_time
from ..readings import Reading
from ..stragglers.chip_signs import is_typical
from .growing_file import GrowingFile
from .records_table import parse_records
from .series import Numbers

TAIL = 512 << 10  # bytes of the newest readings: minutes of one a second
MOST_CHIPS = 1 << 16  # that a host may have
LEAST = 16 << 10  # bytes, in which there is one reading of a host with many chips


class HostReadings:
    """Readings of one process, read on as its monitor writes them.

    Args:
        path: The file.
        inside: The run directory, which links must not lead out of.
    """

    def __init__(self, path: Path, *, inside: Path) -> None:
        self._inside = inside
        self._file = GrowingFile(path, inside=inside)
        self._lines = 0
        self._samples: dict[tuple[str, int | None], tuple[array[float], array[float]]] = {}

    def history(self, metric: str, chip: int | None) -> tuple[Numbers, Numbers]:
        """Return times and values of a metric, the mean over what it was read of at each time.

        Args:
            metric: A name of the glossary; of quantiles the median is taken.
            chip: Which chip; all by default.
        """
        self._poll()
        parts = [
            _arrays(*pair)
            for (name, on), pair in self._samples.items()
            if name == metric and (chip is None or on == chip)
        ]
        if not parts:
            return np.empty(0), np.empty(0)
        times = np.concatenate([times for times, _ in parts])
        values = np.concatenate([values for _, values in parts])
        at, place = np.unique(times, return_inverse=True)
        return at, np.bincount(place, values) / np.bincount(place)

    @property
    def loaded_bytes(self) -> int:
        """Bytes of all times and values."""
        return sum(8 * 2 * len(times) for times, _ in self._samples.values())

    def metrics(self) -> list[str]:
        """Return the metrics that were ever read."""
        self._poll()
        return list(dict.fromkeys(name for name, _ in self._samples))

    def _poll(self) -> None:
        for piece in self._file.poll():
            if piece.keep < self._lines:  # monitors only append, so it is another file
                self.__init__(self._file.path, inside=self._inside)
                self._poll()
                return
            self._lines += piece.count
            for reading in map(as_reading, parse_records(piece.lines)):
                if reading is not None:
                    self._add(reading)

    def _add(self, reading: Reading) -> None:
        for sample in filter(lambda one: is_typical(one.labels), reading.samples):
            key = sample.metric, sample.chip
            times, values = self._samples.setdefault(key, (array("d"), array("d")))
            times.append(reading.time)
            values.append(sample.value)


def share_of(most: int, files: int) -> int:
    """Return how many bytes at the end of each of some files to read, so that all are few."""
    return max(LEAST, min(TAIL, most // max(1, files)))


def newest_readings(path: Path, size: int = TAIL, *, inside: Path | None = None) -> list[Reading]:
    """Return the readings in the last `size` bytes of a file, oldest first.

    Args:
        path: The file.
        size: Bytes to read.
        inside: The run directory, which links must not lead out of; None follows every link.
    """
    lines, _ = read_end(path, size, inside=inside)
    found = (as_reading(record) for record in parse_records(lines))
    return [reading for reading in found if reading is not None]


def as_reading(record: Mapping[str, Any] | None) -> Reading | None:
    """Return the reading that a line holds; None when it holds none, or one that makes no sense."""
    if record is None:
        return None
    try:
        reading = Reading.from_dict(record)
    except (KeyError, TypeError, AttributeError):
        return None
    named = type(reading.host) is str and type(reading.process) is int
    chips = (sample.chip for sample in reading.samples)
    makes_sense = (
        named
        and is_time(reading.time)
        and all(is_number(sample.value) for sample in reading.samples)
        and all(chip is None or (type(chip) is int and 0 <= chip < MOST_CHIPS) for chip in chips)
    )
    return reading if makes_sense else None


def _arrays(times: "array[float]", values: "array[float]") -> tuple[Numbers, Numbers]:
    # Copies: an array that is looked at through a view cannot grow.
    return np.array(times), np.array(values)
