"""Read files that another program wrote: only regular files, and no links out of a folder.

A run directory may be shared. A FIFO in it would block its reader for ever, and a link to a file
outside would show that file to everyone who may see the run.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_plain(path: Path, *, inside: Path | None = None) -> BinaryIO:
    """Open a regular file to read its bytes; a FIFO or a device is never opened.

    Args:
        path: The file.
        inside: The folder that links must not lead out of; None follows every link.

    Raises:
        OSError: It cannot be read, is no regular file, or is outside `inside`.
    """
    _require_regular(os.stat(path), path)
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb")
    try:
        about = os.fstat(file.fileno())
        _require_regular(about, path)  # it may have been replaced meanwhile
        if inside is not None:
            real, folder = os.path.realpath(path), os.path.realpath(inside)
            is_inside = os.path.commonpath((real, folder)) == folder
            if not is_inside or not os.path.samestat(os.lstat(real), about):
                raise PermissionError(
                    errno.EACCES, f"it is a link out of {inside.name}, which is not followed", path
                )
    except BaseException:
        file.close()
        raise
    return file


def read_plain(path: Path, *, inside: Path | None = None, at_most: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: As `open_plain`, or the file has more than `at_most` bytes.
    """
    with open_plain(path, inside=inside) as file:
        data = file.read() if at_most is None else file.read(at_most + 1)
    if at_most is not None and len(data) > at_most:
        raise OSError(errno.EFBIG, f"it has more than {at_most:,} bytes", path)
    return data


def _require_regular(about: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", path)
