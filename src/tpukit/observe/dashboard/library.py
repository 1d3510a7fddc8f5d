"""What the folders hold: runs, plans and checks by name, read on once for all viewers.

Names come from what was found, and only names that were found are answered, so that no request can
lead to a file outside.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...checker.report.schema import SCHEMA as CHECK_SCHEMA
from ...errors import did_you_mean
from ...planner.answer.recorded import SCHEMA as PLAN_SCHEMA
from ...runtime.plain_files import open_plain
from ...runtime.run_files import (
    CHECK_FILE,
    EVENTS_FILE,
    HOST_READINGS_FILE,
    HOST_STEPS_FILE,
    HOSTS_FOLDER,
    IDENTITY_FILE,
    LOG_FILE,
    METRICS_FILE,
)
from ..runs.run import is_run
from .memory import AnswerMemory, Reader

POLL_S = 1.0
LARGEST_DOCUMENT = 64 << 20
_USUAL_FOLDER = "runs"
_GROWING = (IDENTITY_FILE, METRICS_FILE, EVENTS_FILE, LOG_FILE, CHECK_FILE)
_SCHEMA = re.compile(rb'"schema"\s*:\s*"([^"]{1,64})"')
_KINDS = {PLAN_SCHEMA.encode(): "plan", CHECK_SCHEMA.encode(): "compile"}
Found = TypeVar("Found")


class NotFound(Exception):
    """Nothing of that name was found."""


class WatchedRun:
    """A run of the library.

    Attributes:
        path: Its folder.
        version: Goes up whenever its files were written.
        stamp: When that was, and what it is told by.
        ends: Reads the ends of its files, which is quick however long they are.
        whole: Reads all of them; the first time may take a second, which nothing else waits for.
        is_running: Whether its last summary said so; another one is not made until it is written.
        is_reported: Whether the log has the error that its summary ended in.
    """

    def __init__(self, path: Path, memory: AnswerMemory) -> None:
        self.path = path
        self.version = 0
        self.is_running, self.is_reported = True, False
        self.stamp: tuple[float, int] = (0.0, 0)
        self.ends, self.whole = Reader(path, memory), Reader(path, memory)


@dataclass(frozen=True)
class KeptDocument:
    """A plan or a check that was kept as JSON."""

    kind: str
    path: Path
    stamp: Any


class Library:
    """Everything found in some folders.

    Args:
        folders: Each holds runs and documents, or is a run; `runs` inside it is looked into too.
        clock: Seconds, for how often files are looked at.
    """

    def __init__(
        self, folders: Iterable[Path], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folders = tuple(folder.absolute() for folder in folders)
        self._clock = clock
        self._memory = AnswerMemory()
        self._polled: float | None = None
        self._lock = threading.Lock()
        self._runs: dict[str, WatchedRun] = {}
        self._documents: dict[str, KeptDocument] = {}

    def poll(self) -> None:
        """Look at the files again, unless somebody just did."""
        with self._lock:
            now = self._clock()
            if self._polled is not None and now - self._polled < POLL_S * 0.9:
                return
            self._find()
            self._polled = now

    def runs(self) -> dict[str, WatchedRun]:
        """Return the runs by name, the most recently written first."""
        self.poll()
        return self._runs

    def run(self, name: str) -> WatchedRun:
        """Return one run.

        Raises:
            NotFound: There is none of that name, with the names there are.
        """
        return _named(self.runs(), name, "run")

    def documents(self, kind: str) -> dict[str, KeptDocument]:
        """Return the plans ("plan") or checks ("compile") by name, the newest first."""
        self.poll()
        return {name: one for name, one in self._documents.items() if one.kind == kind}

    def document(self, kind: str, name: str) -> KeptDocument:
        """Return one document.

        Raises:
            NotFound: There is none of that name, with the names there are.
        """
        return _named(self.documents(kind), name, kind)

    def _find(self) -> None:
        known = {one.path: one for one in self._runs.values()}
        folders = [inside for one in self.folders for inside in (one, one / _USUAL_FOLDER)]
        paths = dict.fromkeys(path for folder in folders for path in _runs_in(folder))
        found = [known.get(path) or WatchedRun(path, self._memory) for path in paths]
        for one in found:
            stamp = _stamp_of_run(one.path)
            if stamp != one.stamp:
                one.stamp, one.version = stamp, one.version + 1
        found.sort(key=lambda one: -one.stamp[0])
        self._runs = _by_name([(one.path, one) for one in found])
        before = {one.path: one for one in self._documents.values()}
        documents = [
            one
            for folder in (*folders, *paths)
            for path in _files_in(folder, ".json")
            if (one := _document(path, before.get(path)))
        ]
        documents.sort(key=lambda one: -one.stamp[1])
        self._documents = _by_name([(one.path, one) for one in documents])


def _by_name(found: list[tuple[Path, Found]]) -> dict[str, Found]:
    """Name things by the end of their paths, as much of it as tells them apart."""
    named: dict[str, Found] = {}
    paths = [path for path, _ in found]
    for path, one in found:
        length = 1
        while length < len(path.parts) - 1 and _shared(path, paths, length):
            length += 1
        named.setdefault("/".join(path.parts[-length:]), one)
    return named


def _shared(path: Path, paths: list[Path], length: int) -> bool:
    return sum(other.parts[-length:] == path.parts[-length:] for other in paths) > 1


def _named(found: dict[str, Found], name: str, what: str) -> Found:
    if name in found:
        return found[name]
    known = ", ".join(list(found)[:5]) or "none"
    raise NotFound(f"there is no {what} {name!r:.80}; known are {known}{did_you_mean(name, found)}")


def _runs_in(folder: Path) -> list[Path]:
    if is_run(folder):
        return [folder]
    return [path for name in _names(folder) if is_run(path := folder / name)]


def _stamp_of_run(path: Path) -> tuple[float, int]:
    """Return when its files were last written, and something that changes whenever one does."""
    files = [path / name for name in _GROWING]
    files += [
        path / HOSTS_FOLDER / host / name for host in _names(path / HOSTS_FOLDER) for name in _HOST
    ]
    stats = [_stat(file) for file in files]
    newest = max((one[1] for one in stats if one), default=0.0)
    return newest, hash(tuple(stats))


_HOST = (HOST_STEPS_FILE, HOST_READINGS_FILE)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _files_in(folder: Path, ending: str) -> list[Path]:
    return [folder / name for name in _names(folder) if name.endswith(ending)]


def _stat(path: Path) -> tuple[int, float, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_size, about.st_mtime, about.st_ino


def _document(path: Path, before: KeptDocument | None) -> KeptDocument | None:
    """Return the document that a file holds, told by the key that both kinds begin with."""
    stamp = _stat(path)
    if stamp is None or not 0 < stamp[0] <= LARGEST_DOCUMENT:
        return None
    if before is not None and before.stamp == stamp:
        return before
    try:
        with open_plain(path, inside=path.parent) as file:
            said = _SCHEMA.search(file.read(256))
    except OSError:
        return None
    kind = _KINDS.get(said[1]) if said else None
    return KeptDocument(kind, path, stamp) if kind else None
