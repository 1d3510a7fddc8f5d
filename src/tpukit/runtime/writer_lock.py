"""An exclusive write lock on a folder, which ends with the process that holds it."""

import atexit
import contextlib
import getpass
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from filelock import BaseFileLock, FileLock, Timeout

from ..errors import TPUValidationError
from ..plain_data import JsonObject

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


@dataclass(frozen=True)
class Writer:
    """The process that writes to a folder.

    Attributes:
        began: Unix seconds.
    """

    pid: int
    user: str
    host: str
    began: float

    @classmethod
    def here(cls) -> "Writer":
        """Return this process."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user may have no name
            user = str(os.getuid())
        return cls(os.getpid(), user, socket.gethostname(), time.time())

    def __str__(self) -> str:
        age_s = max(0.0, time.time() - self.began)
        units = ((DAY_S, "days"), (HOUR_S, "h"), (MINUTE_S, "min"), (1, "s"))
        size, unit = next((row for row in units if age_s >= 2 * row[0]), units[-1])
        where = f"process {self.pid} of {self.user} on {self.host}"
        return f"{where}, which began {age_s / size:.0f} {unit} ago"


class WriterLock:
    """A lock file that names its holder; the operating system frees it when the holder ends.

    Args:
        path: The lock file, which stays when the lock is released.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: BaseFileLock | None = None

    def take(self, *, wait_s: float = 0.0, what: str, instead: str) -> None:
        """Take the lock, or raise.

        Args:
            wait_s: How long to wait for the holder.
            what: The locked thing, for the error message.
            instead: The alternative, for the error message.

        Raises:
            TPUValidationError: Another process has it.
            OSError: The lock file cannot be made.
        """
        # Whatever thread closes a run or a checkpointer releases it.
        lock = FileLock(self._path, mode=0o600, thread_local=False, on_acquired=_write_owner)
        try:
            lock.acquire(timeout=wait_s, poll_interval=0.2)
        except Timeout:
            holder = _read_owner(self._path) or "another process"
            raise TPUValidationError(f"{what} is being written by {holder}; {instead}") from None
        self._lock = lock
        # The destructor of a lock that outlives the interpreter's modules fails with a traceback.
        atexit.register(self.release)

    def release(self) -> None:
        """Let other processes take it."""
        atexit.unregister(self.release)
        if self._lock is not None:
            self._lock.release(force=True)
            self._lock = None


def _write_owner(descriptor: int) -> None:
    text = json.dumps(asdict(Writer.here())) + "\n"
    with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _read_owner(path: Path) -> Writer | None:
    try:
        said: Any = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(said, dict):
        return None
    found = cast("JsonObject", said)
    try:
        return Writer(
            int(found["pid"]), str(found["user"]), str(found["host"]), float(found["began"])
        )
    except (KeyError, TypeError, ValueError):
        return None
