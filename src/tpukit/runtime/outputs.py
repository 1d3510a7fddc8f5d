"""Outputs that a user named, tried before the work that fills them starts.

Trying is the only way to know: permissions, a read-only disk and a full one answer differently for
each user and each file system.
"""

import contextlib
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ..errors import TPUValidationError
from .files import PARTIAL


def try_output_file(path: Path) -> None:
    """Refuse a path at which no file can be written; nothing is left there.

    Raises:
        TPUValidationError: It is a folder, its folder is not there, or nothing can be written.
    """
    with _refused(path):
        if path.is_dir():
            raise TPUValidationError(f"{path} is a folder, and a file is written; name one in it.")
        if not path.parent.exists():
            raise TPUValidationError(
                f"{path} cannot be written, because there is no folder {path.parent}; make it "
                "first, or choose another place."
            )
        _write_trial(path.parent, path.name)


def try_output_folder(path: Path) -> None:
    """Refuse a path at which no folder can be made or filled; nothing is left there.

    Raises:
        TPUValidationError: It is a file or below one, or nothing can be written there.
    """
    with _refused(path):
        there = next(one for one in (path, *path.absolute().parents) if one.exists())
        if not there.is_dir():
            raise TPUValidationError(
                f"{path} cannot be a folder, because {there} is a file; choose another place."
            )
        _write_trial(there, path.name)


def _write_trial(folder: Path, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        (folder / name).lstat()  # refuses a name that is too long
    trial = folder / f".{secrets.token_hex(4)}{PARTIAL}"
    try:
        trial.write_bytes(b"a full disk makes files, and refuses what is in them")
    finally:
        trial.unlink(missing_ok=True)


@contextmanager
def _refused(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise TPUValidationError(
            f"{path} cannot be written ({error.strerror}); choose another place."
        ) from None
