"""`hosts/<process>/readings.jsonl`: monitor readings of each host, newest and history."""

from array import array
from pathlib import Path

import numpy as np

from ...records.lines import try_read_end
from ..readings import Reading, parse_readings
from ..stragglers.detection import is_typical
from .growing_file import GrowingFile
from .series import Numbers

TAIL = 512 << 10  # bytes of the newest readings: minutes at one per second
LEAST = 16 << 10  # bytes that contain one reading of a host with many chips


class HostReadings:
    """Readings of one process, read while its monitor writes them.

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
        """Return times and values of a metric, averaged over chips and links at each time.

        Args:
            metric: A name of `METRICS`; for quantiles, the median is used.
            chip: A chip's index; all chips by default.
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
        """Return the metrics that occur in the readings."""
        self._poll()
        return list(dict.fromkeys(name for name, _ in self._samples))

    def _poll(self) -> None:
        for piece in self._file.poll():
            if piece.keep < self._lines:  # monitors only append, so it is another file
                self.__init__(self._file.path, inside=self._inside)
                self._poll()
                return
            self._lines += piece.count
            for reading in parse_readings(piece.lines):
                self._add(reading)

    def _add(self, reading: Reading) -> None:
        for sample in reading.samples:
            if not is_typical(sample.labels):
                continue
            key = sample.metric, sample.chip
            times, values = self._samples.setdefault(key, (array("d"), array("d")))
            times.append(reading.time)
            values.append(sample.value)


def share_of(most: int, files: int) -> int:
    """Return how many bytes to read from the end of each of `files`, for `most` in total."""
    return max(LEAST, min(TAIL, most // max(1, files)))


def newest_readings(path: Path, size: int = TAIL, *, inside: Path | None = None) -> list[Reading]:
    """Return the readings in the last `size` bytes of a file, oldest first.

    Args:
        path: The file.
        size: Bytes to read.
        inside: The run directory, which links must not lead out of; None follows every link.
    """
    lines, _ = try_read_end(path, size, inside=inside)
    return parse_readings(lines)


def _arrays(times: "array[float]", values: "array[float]") -> tuple[Numbers, Numbers]:
    # Copies, because an array with a numpy view cannot grow.
    return np.array(times), np.array(values)
