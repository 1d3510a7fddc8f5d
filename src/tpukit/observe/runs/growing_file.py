"""A file of lines that grows while it is read: a poll reads only what is new.

A line is taken when its end is there, so one that is half written waits. A file that was rewritten
(`metrics.jsonl` after a rollback: the same lines up to a step, then others) is read again from the
last place up to which it still is what it was; one that is gone is empty until it is back. A disk
that refuses to be read leaves what was read before as it is.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ...runtime.plain_files import open_plain

CHUNK = 1 << 18
LONGEST_LINE = 16 << 20
# Bytes before a place that are compared to see whether the file is still the same: lines of ours
# end with a time to the microsecond, so that no two lines are alike.
COMPARED = 200


@dataclass(frozen=True)
class Piece:
    """Lines that were read at once.

    Attributes:
        keep: Lines of those given before that still hold; the others are gone from the file.
        text: The lines that come after them, each with its line break.
        count: How many lines those are.
    """

    keep: int
    text: bytes
    count: int

    @property
    def lines(self) -> list[bytes]:
        """The lines of the text, without line breaks."""
        return self.text.split(b"\n")[:-1]


@dataclass(frozen=True)
class _Mark:
    """A place up to which the file was read."""

    offset: int
    lines: int
    before: bytes


_START = _Mark(0, 0, b"")


class GrowingFile:
    """Reads a file of lines once, and then what was added.

    Args:
        path: The file; it need not be there yet.
        inside: The folder that it must be in, links followed; None for any.

    Attributes:
        error: Why the file could not be read the last time, or "".
    """

    def __init__(self, path: Path, *, inside: Path | None = None) -> None:
        self.path, self.inside = path, inside
        self.error = ""
        self._marks = [_START]
        self._stamp: tuple[int, int, int, int] | None = None

    def check(self) -> None:
        """Find out whether the file can be read, without reading it."""
        try:
            open_plain(self.path, inside=self.inside).close()
            self.error = ""
        except FileNotFoundError:
            self.error = ""
        except OSError as error:
            self.error = self._why(error)

    def poll(self) -> Iterator[Piece]:
        """Yield what is new since the last call, in pieces of about `CHUNK` bytes."""
        try:
            with open_plain(self.path, inside=self.inside) as file:
                self.error = ""
                yield from self._read(file)
        except FileNotFoundError:
            self.error = ""
            yield from self._back_to([_START])
        except OSError as error:
            self.error = self._why(error)

    def _why(self, error: OSError) -> str:
        return f"{self.path.name} cannot be read: {error.strerror or error}"

    def _read(self, file: BinaryIO) -> Iterator[Piece]:
        about = os.fstat(file.fileno())
        stamp = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
        if stamp == self._stamp:
            return
        if not _holds(file, self._marks[-1]):
            yield from self._back_to([mark for mark in self._marks if _holds(file, mark)])
        self._stamp = stamp
        file.seek(self._marks[-1].offset)
        while True:
            last = self._marks[-1]
            chunk = file.read(CHUNK)
            end = chunk.rfind(b"\n") + 1
            while chunk and not end and (more := file.read(CHUNK)):  # a line longer than a chunk
                chunk += more
                end = chunk.rfind(b"\n") + 1
                if len(chunk) > LONGEST_LINE:
                    raise OSError(f"a line has more than {LONGEST_LINE:,} bytes")
            if not end:
                return
            text = chunk[:end]
            # bytes.count takes four times as long.
            count = int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n")))
            mark = _Mark(last.offset + end, last.lines + count, text[-COMPARED:])
            # A poll that adds a few lines moves the last mark, or there would be one a second.
            if len(self._marks) > 1 and mark.offset - self._marks[-2].offset < CHUNK:
                self._marks[-1] = mark
            else:
                self._marks.append(mark)
            yield Piece(last.lines, text, count)
            file.seek(mark.offset)

    def _back_to(self, marks: list[_Mark]) -> Iterator[Piece]:
        gone = marks[-1].lines < self._marks[-1].lines
        self._marks = marks
        if gone:
            yield Piece(marks[-1].lines, b"", 0)


def _holds(file: BinaryIO, mark: _Mark) -> bool:
    file.seek(mark.offset - len(mark.before))
    return file.read(len(mark.before)) == mark.before
