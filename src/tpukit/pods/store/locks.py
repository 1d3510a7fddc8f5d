"""Locks between processes: held by an open file, so that they end with whoever held them."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ...runtime.files import private_folder


@contextmanager
def holding(path: Path) -> Generator[bool]:
    """Hold a lock for the block; yields False where somebody else holds it."""
    private_folder(path.parent)
    # A child must not keep it: Python opens files so that children do not inherit them.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Tell whether somebody holds a lock."""
    if not path.exists():
        return False
    with holding(path) as mine:
        return not mine
