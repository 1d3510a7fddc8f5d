"""Files of JSON lines that a run appends to: written without stopping it, read from their end."""

import io
import itertools
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from pydantic_core import from_json  # three times as fast as json.loads

from ..plain_data import JsonObject
from ..runtime.files import open_private
from ..runtime.plain_files import open_plain

logger = logging.getLogger(__name__)

LONGEST_WAITING = 16 << 20  # bytes
LATEST = 2.0**36  # unix seconds: the year 4147
_LARGEST = sys.float_info.max
_LINES_AT_ONCE = 4096


class AppendedLines:
    """Appends lines to a file, each in one write.

    Lines that the disk refuses wait in memory for the next write, so that a full disk does not stop
    a run.

    Args:
        path: The file; it and its folder are made at the first line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None
        self._waiting = b""
        self._warned = False

    def write(self, text: str) -> None:
        """Append text that ends with a line break."""
        if len(self._waiting) < LONGEST_WAITING:
            self._waiting += text.encode()
        self._flush()

    def close(self) -> None:
        """Try once more to write the waiting lines, and close the file."""
        if self._waiting:
            self._flush()
            self._waiting = b""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush(self) -> None:
        try:
            file = self._file or self._open()
            # A disk that fills up takes a part of a line; the rest follows when there is room.
            self._waiting = self._waiting[file.write(self._waiting) :]
        except OSError as error:
            if not self._warned:
                logger.warning("lines of %s cannot be written yet: %s", self.path, error)
            self._warned = True
        else:
            self._warned = bool(self._waiting)

    def _open(self) -> io.FileIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = file = io.FileIO(self.path, "a", opener=open_private)
        if file.tell():
            with self.path.open("rb") as end:  # a kill may have cut the last line
                end.seek(-1, 2)
                if end.read(1) != b"\n":
                    self._waiting = b"\n" + self._waiting
        return file


def read_end(path: Path, size: int, *, inside: Path | None = None) -> tuple[list[bytes], bool]:
    """Return the complete lines in the last `size` bytes of a file, and whether that is all of it.

    A last line that is still being written is left out.

    Raises:
        OSError: The file cannot be read, is no regular file, or is a link out of `inside`.
    """
    with open_plain(path, inside=inside) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - size))
        lines = file.read(size).split(b"\n")[:-1]
    return (lines, True) if end <= size else (lines[1:], False)


def try_read_end(path: Path, size: int, *, inside: Path | None = None) -> tuple[list[bytes], bool]:
    """Return what `read_end` returns; a file that cannot be read has no lines."""
    try:
        return read_end(path, size, inside=inside)
    except OSError:
        return [], True


def parse_lines(lines: Sequence[bytes]) -> list[JsonObject | None]:
    """Return the JSON object of each line; None for a line without one, as a kill leaves it.

    Parsing all lines at once is faster than one by one, and works unless one of them is damaged.
    """
    try:
        parsed = from_json(b"[" + b",".join(lines) + b"]", cache_strings="keys")
        if len(parsed) != len(lines):
            raise ValueError("a line has more than one value")
    except ValueError:
        parsed = [_parse(line) for line in lines]
    return [value if isinstance(value, dict) else None for value in parsed]


def iter_records(lines: Iterable[bytes]) -> Iterator[tuple[bytes, JsonObject]]:
    """Yield each complete line of an open file with its JSON object; other lines are skipped."""
    lines = iter(lines)
    while block := list(itertools.islice(lines, _LINES_AT_ONCE)):
        for line, record in zip(block, parse_lines(block), strict=True):
            if record is not None and line.endswith(b"\n"):
                yield line, record


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value of a record is a finite number."""
    if type(value) is float or type(value) is int:
        return -_LARGEST <= value <= _LARGEST
    return False


def is_time(value: object) -> TypeGuard[float]:
    """Return whether a value of a record is a time in unix seconds that a calendar has."""
    return is_number(value) and 0 <= value < LATEST


def _parse(line: bytes) -> Any:
    try:
        return from_json(line)
    except ValueError:
        return None
