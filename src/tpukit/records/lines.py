"""Files of lines that a run appends to: written without hurting it, and read from their end."""

import io
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)


class AppendedLines:
    """Appends lines to a file, each in one write, and goes on without it when the disk refuses.

    Args:
        path: The file; it is made, with its folder, at the first line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None
        self._torn = False
        self._warned = False

    def write(self, text: str) -> None:
        """Append text that ends with a line break."""
        try:
            file = self._file or self._open()
            whole = ("\n" + text if self._torn else text).encode()
            self._torn = file.write(whole) < len(whole)
        except OSError as error:
            self._torn = True
            if not self._warned:
                logger.warning("lines of %s are lost: %s", self.path, error)
                self._warned = True

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> io.FileIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = file = io.FileIO(self.path, "a")
        if file.tell():
            with self.path.open("rb") as end:  # a kill, or a full disk, may have cut the last line
                end.seek(-1, 2)
                self._torn = end.read(1) != b"\n"
        return file


def read_end(path: Path, size: int) -> tuple[list[bytes], bool]:
    """Return the whole lines in the last `size` bytes of a file, and whether that is all of it.

    A file that is not there, or cannot be read, has no lines. A last line that is still being
    written waits.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            lines = file.read(size).split(b"\n")[:-1]
    except OSError:
        return [], True
    return (lines, True) if end <= size else (lines[1:], False)
