"""Locks between processes. The kernel releases a lock when the process that has it ends."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ...runtime.files import private_folder


@contextmanager
def holding(path: Path) -> Generator[bool]:
    """Hold a lock during the block; yield False if another process already has it."""
    private_folder(path.parent)
    lock = FileLock(path, timeout=0, mode=0o600)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Return whether a process has the lock."""
    if not path.exists():
        return False
    with holding(path) as mine:
        return not mine
