"""Files of lines that a run appends to: written without hurting it, and read from their end."""

import io
import logging
import os
from pathlib import Path

from ..runtime.files import open_private
from ..runtime.plain_files import open_plain

logger = logging.getLogger(__name__)


LONGEST_WAITING = 16 << 20  # bytes


class AppendedLines:
    """Appends lines to a file, each in one write.

    Lines that the disk refuses wait in memory for the next write, so that a full disk costs a run
    nothing.

    Args:
        path: The file; it is made, with its folder, at the first line.
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
        """Try once more to write what waits, and close the file."""
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
                logger.warning("lines of %s wait to be written: %s", self.path, error)
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
    """Return the whole lines in the last `size` bytes of a file, and whether that is all of it.

    A file that is not there, cannot be read, is no regular file or is a link out of the folder
    `inside` has no lines. A last line that is still being written waits.
    """
    try:
        with open_plain(path, inside=inside) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            lines = file.read(size).split(b"\n")[:-1]
    except OSError:
        return [], True
    return (lines, True) if end <= size else (lines[1:], False)
