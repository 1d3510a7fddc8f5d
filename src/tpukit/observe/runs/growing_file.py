"""A file of lines that grows while it is read; a poll reads only new lines.

A line is read when it is complete. A file that was rewritten (`metrics.jsonl` after a rollback has
the same lines up to a step, then others) is read again from the last mark before which it is
unchanged. A deleted file counts as empty. After a read error, the lines read before are kept.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ...plain_data import JsonMapping
from ...records.lines import parse_lines
from ...runtime.plain_files import open_plain

CHUNK = 1 << 18
LONGEST_LINE = 16 << 20
# Bytes before a mark that are compared to detect a rewritten file. Lines end with a time in
# microseconds, so that no two lines are equal.
COMPARED = 200


@dataclass(frozen=True)
class Piece:
    """Lines that were read at once.

    Attributes:
        keep: Number of earlier lines that are still in the file.
        text: The lines after them, each with its line break.
        count: Number of lines in `text`.
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
    """An offset up to which the file was read."""

    offset: int
    lines: int
    before: bytes


_START = _Mark(0, 0, b"")


class GrowingFile:
    """Reads a file of lines once, and then only added lines.

    Args:
        path: The file; it need not exist yet.
        inside: The folder that links must not lead out of; None follows every link.

    Attributes:
        error: Why the file could not be read the last time, or "".
    """

    def __init__(self, path: Path, *, inside: Path | None = None) -> None:
        self.path, self.inside = path, inside
        self.error = ""
        self._marks = [_START]
        self._stamp: tuple[int, int, int, int] | None = None

    def check(self) -> None:
        """Set `error` by opening the file, without reading it."""
        try:
            open_plain(self.path, inside=self.inside).close()
            self.error = ""
        except FileNotFoundError:
            self.error = ""
        except OSError as error:
            self.error = self._why(error)

    def poll(self) -> Iterator[Piece]:
        """Yield the changes since the last call, in pieces of about `CHUNK` bytes."""
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
            # A poll with few lines moves the last mark, or there would be one mark per second.
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


BLOCK = 4 << 10  # bytes that contain complete lines


def sample_records(path: Path, count: int, *, inside: Path | None = None) -> list[JsonMapping]:
    """Return up to `count` records from all over a file, in order, with the last one.

    Args:
        path: The file; a file that cannot be read has no records.
        count: Number of places to read.
        inside: The folder that links must not lead out of.
    """
    lines: list[bytes] = []
    try:
        with open_plain(path, inside=inside) as file:
            size = file.seek(0, os.SEEK_END)
            if size <= count * BLOCK:
                file.seek(0)
                all_lines = file.read().split(b"\n")[:-1]
                chosen = {
                    round(at * (len(all_lines) - 1) / max(1, count - 1)) for at in range(count)
                }
                lines = [all_lines[at] for at in sorted(chosen)] if all_lines else []
            else:
                for at in range(count):
                    file.seek(round(at * (size - BLOCK) / (count - 1)))
                    block = file.read(BLOCK).split(b"\n")[:-1]
                    last = at == count - 1
                    lines += block[-1:] if last else block[1:2]
    except OSError:
        return []
    return [record for record in parse_lines(lines) if record]
