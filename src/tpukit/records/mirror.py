"""A local copy of a run whose address is in an object store, brought up to date by each poll.

A poll lists the run's segments and reads only those that are new, so every reader of a local run
directory reads a run in a store, too. Copies are kept in the cache folder; several processes may
bring the same copy up to date.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from filelock import FileLock, Timeout

from ..errors import TPUError, TPUStorageError, TPUValidationError
from ..plain_data import JsonObject, read_json
from ..runtime.files import cache_folder, open_private, private_folder, write_bytes, write_text
from ..runtime.object_store import ObjectStore, is_address
from .hooks import FOLDER as PROFILE_FOLDER
from .names import IDENTITY_FILE
from .segments import (
    RECORDS,
    FileSegment,
    FileVersion,
    files_in,
    newest_version,
    object_name,
    path_through,
)

logger = logging.getLogger(__name__)

POLL_S = 1.0
LONGEST_POLL_S = 30.0
"""Seconds between two polls of a run that no longer changes."""
_STATE = ".copied.json"
_TRIES = 5
_LARGE = (f"{PROFILE_FOLDER}/", "tensorboard/", "wandb/")
"""Folders of a run that its readers do not need, except `tpukit profile`."""


def is_small(file: str) -> bool:
    """Return whether a file belongs to the records that every reader needs."""
    return not file.startswith(_LARGE)


def is_trace(file: str) -> bool:
    """Return whether a file belongs to the records or to the profiler traces."""
    return is_small(file) or file.startswith(f"{PROFILE_FOLDER}/")


class RunMirror:
    """A local folder with the files of a run in an object store.

    Args:
        store: The run's address.
        folder: The local folder, for this address only.
    """

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self.store, self.folder = store, folder
        self._copied: dict[str, tuple[str, int]] = {}

    def pull(self, wanted: Callable[[str], bool] = is_small) -> bool:
        """Copy what is new in the store; return whether anything was.

        Args:
            wanted: Which files to copy, by their path in the run directory.

        Raises:
            TPUValidationError: The address may not be read.
            TPUStorageError: The store cannot be reached.
        """
        private_folder(self.folder)
        for _ in range(_TRIES):
            try:
                with FileLock(f"{self.folder}.lock", timeout=60, mode=0o600):
                    return self._pull(wanted)
            except FileNotFoundError:
                continue  # a segment was merged with others since the listing
            except Timeout:
                break
        raise TPUStorageError(
            f"{self.store.address} changes faster than it can be read; try again."
        )

    def _pull(self, wanted: Callable[[str], bool]) -> bool:
        objects = self.store.objects(RECORDS)
        self._copied = self._read_state()
        before = dict(self._copied)
        found = files_in(objects)
        try:
            for file, segments in found.items():
                newest = newest_version(segments)
                if newest is not None and wanted(file):
                    modified = max(
                        objects[object_name(file, segment)].modified for segment in newest[1]
                    )
                    self._copy(file, *newest, modified=modified)
            for file in [file for file in self._copied if file not in found]:
                (self.folder / file).unlink(missing_ok=True)
                del self._copied[file]
        finally:
            if self._copied != before:
                write_text(self.folder / _STATE, json.dumps(self._copied) + "\n", private=True)
        return self._copied != before

    def _copy(
        self, file: str, version: FileVersion, segments: list[FileSegment], *, modified: float
    ) -> None:
        path = self.folder / file
        known, size = self._copied.get(file, ("", 0))
        is_same = known == str(version) and path.is_file() and path.stat().st_size >= size
        position = size if is_same else 0
        pieces: list[bytes] = []
        for segment in path_through(segments, position):
            start = position - segment.start
            name = object_name(file, segment)
            piece = self.store.read(name, start) if start else self.store.read(name)
            if len(piece) != segment.end - position:
                raise TPUStorageError(
                    f"{self.store.address}/{name} has {len(piece) + start} bytes, but its name "
                    f"requires {segment.end - segment.start}; delete it, or choose another run_dir."
                )
            pieces.append(piece)
            position = segment.end
        if is_same and not pieces:
            return
        private_folder(path.parent)
        if is_same:
            with open(path, "ab", opener=open_private) as target:
                os.truncate(path, size)  # a killed reader may have appended more
                target.write(b"".join(pieces))
        else:
            write_bytes(path, b"".join(pieces), private=True)
        if modified:
            os.utime(path, (modified, modified))
        self._copied[file] = str(version), position

    def _read_state(self) -> dict[str, tuple[str, int]]:
        try:
            state = cast("JsonObject", read_json(self.folder / _STATE))
            return {file: (str(version), int(size)) for file, (version, size) in state.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}


_LOCK = threading.Lock()
_ADDRESSES: dict[Path, str] = {}


def address_of(path: str | Path) -> str:
    """Return the address that a local copy was made from; for any other path, the path itself."""
    resolved = Path(path).resolve()
    with _LOCK:
        for folder in (resolved, *resolved.parents):
            if folder in _ADDRESSES:
                rest = resolved.relative_to(folder).as_posix()
                address = _ADDRESSES[folder]
                return address if rest == "." else f"{address}/{rest}"
    return str(path)


def readable(path: str | Path, *, traces: bool = False) -> Path:
    """Return a local folder with the runs at a path or address.

    A local path is returned as it is. For an address, the copy is brought up to date now, and once
    per second while this process lives.

    Args:
        path: A run directory, or a folder of run directories.
        traces: Whether to copy profiler traces, too.

    Raises:
        TPUValidationError: There is no run at the address, or it may not be read.
        TPUStorageError: The store cannot be reached.
    """
    text = os.fspath(path)
    if not is_address(text):
        return Path(path)
    address = text.rstrip("/")
    copied = _CopiedRuns.of(address)
    copied.pull(is_trace if traces else is_small)
    if not copied.runs:
        raise TPUValidationError(
            f"{address} contains no run ({IDENTITY_FILE} is missing below it); name the run_dir of "
            "a run, or a folder of some."
        )
    copied.follow()
    return copied.folder


class _CopiedRuns:
    """The runs at an address, copied to the cache folder."""

    _all: "dict[str, _CopiedRuns]" = {}  # noqa: RUF012  one per address in this process

    def __init__(self, address: str) -> None:
        self.store = ObjectStore(address)
        digest = hashlib.sha256(address.encode()).hexdigest()[:16]
        self.folder = cache_folder("runs") / digest / address.split("/")[-1]
        self.runs: dict[str, RunMirror] = {}
        self._due: dict[str, tuple[float, float]] = {}
        self._thread: threading.Thread | None = None
        with _LOCK:
            _ADDRESSES[self.folder.resolve()] = address

    @classmethod
    def of(cls, address: str) -> "_CopiedRuns":
        """Return the copies of an address in this process."""
        if address not in cls._all:
            cls._all[address] = cls(address)
        return cls._all[address]

    def pull(self, wanted: Callable[[str], bool] = is_small) -> None:
        """Find all runs, and bring their copies up to date."""
        self._find()
        for mirror in self.runs.values():
            mirror.pull(wanted)

    def follow(self) -> None:
        """Bring the copies up to date in the background."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._follow, name="tpukit-run-copy", daemon=True
            )
            self._thread.start()

    def _find(self) -> None:
        if "" in self.runs:
            return
        names = self.store.names()
        if RECORDS in names:
            self.runs = {"": RunMirror(self.store, self.folder)}
            return
        for name in names:
            if name not in self.runs and not name.startswith("."):
                store = ObjectStore(f"{self.store.address}/{name}")
                if IDENTITY_FILE in store.names(RECORDS):
                    self.runs[name] = RunMirror(store, self.folder / name)

    def _follow(self) -> None:
        searched = time.monotonic()
        while True:
            time.sleep(POLL_S)
            try:
                if time.monotonic() - searched >= LONGEST_POLL_S:
                    self._find()
                    searched = time.monotonic()
                for name, mirror in list(self.runs.items()):
                    self._poll(name, mirror)
            except (TPUError, OSError) as error:
                logger.debug("%s cannot be read now: %s", self.store.address, error)

    def _poll(self, name: str, mirror: RunMirror) -> None:
        """Poll a run if it is due; the longer it has not changed, the more rarely."""
        now = time.monotonic()
        due, changed = self._due.get(name, (now, now))
        if now < due:
            return
        if mirror.pull():
            changed = now
        silent_s = time.monotonic() - changed
        self._due[name] = now + min(LONGEST_POLL_S, max(POLL_S, silent_s / 10)), changed
