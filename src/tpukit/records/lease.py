"""The lease of a run in an object store: one process writes the run at a time.

Each attempt creates the next numbered object below `lease/`, under the condition that it does not
exist, so of two attempts one gets it. The owner writes its object again every few seconds. A lease
that was released, was not renewed for `EXPIRES_S` by the store's own clock, or whose process on
this machine has ended, may be followed by the next number. The number is the epoch in the names of
segments, so that lines of an owner that was given up do not count.
"""

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

import psutil

from ..errors import TPUError, TPUValidationError
from ..runtime.object_store import ObjectStore
from ..runtime.writer_lock import Writer

logger = logging.getLogger(__name__)

LEASES = "lease"
RENEW_S = 5.0
EXPIRES_S = 30.0
POLL_S = 1.0


class RunLease:
    """The right to write a run, renewed in the background.

    Args:
        store: The run's address.
        on_lost: Called once, in another thread, if another process has taken the lease.
    """

    def __init__(self, store: ObjectStore, *, on_lost: Callable[[], None]) -> None:
        self._store, self._on_lost = store, on_lost
        self.epoch = 0
        self._token = secrets.token_hex(8)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, *, wait_s: float, instead: str) -> None:
        """Take the lease, or raise.

        Args:
            wait_s: How long to wait for the owner to end.
            instead: The alternative, for the error message.

        Raises:
            TPUValidationError: Another process has it, or the address may not be written.
            TPUStorageError: The store cannot be reached.
        """
        began = time.monotonic()
        store_time = self._store.try_access(LEASES)
        while True:
            newest = self._newest()
            owner = None if newest is None else self._read(newest)
            age_s = 0.0
            if newest is not None:
                with contextlib.suppress(FileNotFoundError):
                    modified = self._store.modified(_name(newest))
                    now = store_time + time.monotonic() - began
                    age_s = max(0.0, now - modified) if modified else 0.0
            if owner is None or _has_ended(owner) or age_s > EXPIRES_S:
                if self._create((newest or 0) + 1):
                    return
            elif time.monotonic() - began >= wait_s:
                raise TPUValidationError(
                    f"The run directory {self._store.address} is being written by "
                    f"{_writer(owner)} and renewed its lease {age_s:.0f} s ago; {instead} The "
                    f"lease of a run that was killed expires after {EXPIRES_S:.0f} s."
                )
            else:
                time.sleep(POLL_S)

    def release(self) -> None:
        """Let other processes take the lease at once."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
            with contextlib.suppress(TPUError, OSError):
                if self._is_mine():
                    self._store.write(_name(self.epoch), self._content(ended=True))

    def _create(self, epoch: int) -> bool:
        if not self._store.create(_name(epoch), self._content()):
            return False
        self.epoch = epoch
        if not self._is_mine():  # a store without conditions, and another process was later
            return False
        older = [name for name in self._store.objects(LEASES) if name < _name(epoch)]
        self._store.remove(older)
        self._thread = threading.Thread(target=self._renew, name="tpukit-run-lease", daemon=True)
        self._thread.start()
        return True

    def _renew(self) -> None:
        while not self._over.wait(RENEW_S):
            try:
                if not self._is_mine():
                    self._on_lost()
                    return
                self._store.write(_name(self.epoch), self._content())
            except (TPUError, OSError) as error:
                logger.debug("the lease of %s is not renewed: %s", self._store.address, error)

    def _is_mine(self) -> bool:
        owner = self._read(self.epoch)
        is_newest = (self._newest() or 0) <= self.epoch
        return is_newest and owner is not None and owner.get("token") == self._token

    def _newest(self) -> int | None:
        names = (name.split("/")[-1].removesuffix(".json") for name in self._store.objects(LEASES))
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def _read(self, epoch: int) -> dict[str, Any] | None:
        """Return the owner's entries; None if there is no such lease, or it is damaged."""
        try:
            found = json.loads(self._store.read(_name(epoch)))
        except (FileNotFoundError, ValueError):
            return None
        return cast("dict[str, Any]", found) if isinstance(found, dict) else None

    def _content(self, *, ended: bool = False) -> bytes:
        began = psutil.Process().create_time()
        owner = {**asdict(Writer.here()), "began": began, "machine": _machine()}
        return (json.dumps({**owner, "token": self._token, "ended": ended}) + "\n").encode()


def _name(epoch: int) -> str:
    return f"{LEASES}/{epoch:06d}.json"


def _machine() -> str:
    """Return the boot and the process namespace of this machine; "" where the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _has_ended(owner: dict[str, Any]) -> bool:
    """Return whether the owner released its lease, or was a process of this machine and is gone."""
    if owner.get("ended"):
        return True
    if not _machine() or owner.get("machine") != _machine():
        return False
    try:
        process = psutil.Process(int(owner["pid"]))
        is_other = abs(process.create_time() - float(owner["began"])) > 1.0  # the number again
        return is_other or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def _writer(owner: dict[str, Any]) -> str:
    try:
        writer = Writer(
            int(owner["pid"]), str(owner["user"]), str(owner["host"]), float(owner["began"])
        )
    except (KeyError, TypeError, ValueError):
        return "another process"
    return str(writer)
