"""The library: runs, plans and checks in some folders, by name, read once for all viewers.

Only names of found files are answered, so that no request can reach a file outside of the folders.
Two hundred runs of 10⁵ steps are two gigabytes of numbers, so only the most recently used answers
and runs stay in memory; a dropped run is read again.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...checker.report.schema import SCHEMA as CHECK_SCHEMA
from ...errors import did_you_mean
from ...planner.answer.result import SCHEMA as PLAN_SCHEMA
from ...records.names import (
    CHECK_FILE,
    EVENTS_FILE,
    HOST_READINGS_FILE,
    HOST_STEPS_FILE,
    HOSTS_FOLDER,
    IDENTITY_FILE,
    LOG_FILE,
    METRICS_FILE,
)
from ...runtime.plain_files import open_plain
from ..runs import Run
from ..runs.run import is_run
from .answers import encoded

MOST_ANSWER_BYTES = 32 << 20
MOST_RUN_BYTES = 96 << 20


class AnswerMemory:
    """Keeps the most recently used answers and runs of a library.

    Args:
        answer_bytes: The most bytes of answers.
        run_bytes: The most bytes of fully read runs; the last one always stays.
    """

    def __init__(
        self, *, answer_bytes: int = MOST_ANSWER_BYTES, run_bytes: int = MOST_RUN_BYTES
    ) -> None:
        self._answer_bytes, self._run_bytes = answer_bytes, run_bytes
        self._lock = threading.Lock()
        # Both have the least recently used entry first.
        self._answers: dict[Hashable, tuple[Hashable, bytes]] = {}
        self._answered = 0
        self._loaded: dict[Reader, int] = {}

    def find(self, what: Hashable, version: Hashable) -> bytes | None:
        """Return the answer kept for a version, or None."""
        with self._lock:
            kept = self._answers.get(what)
            if kept is None or kept[0] != version:
                return None
            self._answers[what] = self._answers.pop(what)
            return kept[1]

    def keep(self, what: Hashable, version: Hashable, answer: bytes) -> None:
        """Keep an answer, and drop that of an older version."""
        with self._lock:
            self._forget(what)
            self._answers[what] = version, answer
            self._answered += len(answer)
            while self._answered > self._answer_bytes:
                self._forget(next(iter(self._answers)))

    def note(self, reader: "Reader") -> None:
        """Record that a run was read, and drop the least recently used runs."""
        with self._lock:
            self._loaded.pop(reader, None)
            if size := reader.run.loaded_bytes:
                self._loaded[reader] = size
            for other in list(self._loaded):
                if other is reader or sum(self._loaded.values()) <= self._run_bytes:
                    return
                if other.drop():
                    del self._loaded[other]

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the runs that are kept."""
        with self._lock:
            return sum(self._loaded.values())

    def _forget(self, what: Hashable) -> None:
        if what in self._answers:
            self._answered -= len(self._answers.pop(what)[1])


class Reader:
    """A run that is read by one thread at a time, with its answers kept.

    Args:
        path: The run directory.
        memory: Keeps answers, and drops runs.
    """

    def __init__(self, path: Path, memory: AnswerMemory) -> None:
        self.run = Run(path)
        self.lock = threading.Lock()
        self._memory = memory

    def answer(self, what: Hashable, version: Hashable, make: Callable[[Run], Any]) -> bytes:
        """Return an answer about the run as JSON, made once per version of its files."""
        key = (self, what)
        with self.lock:
            kept = self._memory.find(key, version)
            if kept is not None:
                return kept
            made = encoded(make(self.run))
        self._memory.keep(key, version, made)
        self._memory.note(self)
        return made

    def load(self) -> None:
        """Read all files of the run."""
        with self.lock:
            self.run.metrics()
        self._memory.note(self)

    def drop(self) -> bool:
        """Discard all data read, unless a thread is reading; return whether it was discarded."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            self.run.unload()
        finally:
            self.lock.release()
        return True


POLL_S = 1.0
LARGEST_DOCUMENT = 64 << 20
_USUAL_FOLDER = "runs"
_GROWING = (IDENTITY_FILE, METRICS_FILE, EVENTS_FILE, LOG_FILE, CHECK_FILE)
_SCHEMA = re.compile(rb'"schema"\s*:\s*"([^"]{1,64})"')
_KINDS = {PLAN_SCHEMA.encode(): "plan", CHECK_SCHEMA.encode(): "compile"}
Found = TypeVar("Found")


class NotFound(Exception):
    """Nothing has this name."""


class WatchedRun:
    """A run of the library.

    Attributes:
        path: Its folder.
        version: Increases whenever its files change.
        stamp: When its files were last written, and a hash that changes with them.
        ends: Reads the ends of its files, which is fast for files of any length.
        whole: Reads the complete files, which may take a second the first time.
        is_running: Whether its last summary has the state "running"; else no new one is made until
            its files change.
        is_reported: Whether an error of its summary is in the log.
    """

    def __init__(self, path: Path, memory: AnswerMemory) -> None:
        self.path = path
        self.version = 0
        self.is_running, self.is_reported = True, False
        self.stamp: tuple[float, int] = (0.0, 0)
        self.ends, self.whole = Reader(path, memory), Reader(path, memory)


@dataclass(frozen=True)
class KeptDocument:
    """A plan or a check in a JSON file."""

    kind: str
    path: Path
    stamp: Any


class Library:
    """The runs, plans and checks in some folders.

    Args:
        folders: Folders with runs and documents, or run directories; `runs` inside them is searched
            too.
        clock: A clock in seconds, which limits how often files are checked.
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
        """Check the files again, unless they were just checked."""
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
            NotFound: Nothing has this name; the message lists the names.
        """
        return _named(self.runs(), name, "run")

    def documents(self, kind: str) -> dict[str, KeptDocument]:
        """Return the plans ("plan") or checks ("compile") by name, the newest first."""
        self.poll()
        return {
            name: document for name, document in self._documents.items() if document.kind == kind
        }

    def document(self, kind: str, name: str) -> KeptDocument:
        """Return one document.

        Raises:
            NotFound: Nothing has this name; the message lists the names.
        """
        return _named(self.documents(kind), name, kind)

    def _find(self) -> None:
        known = {run.path: run for run in self._runs.values()}
        folders = [inside for folder in self.folders for inside in (folder, folder / _USUAL_FOLDER)]
        paths = dict.fromkeys(path for folder in folders for path in _runs_in(folder))
        runs = [known.get(path) or WatchedRun(path, self._memory) for path in paths]
        for run in runs:
            stamp = _stamp_of_run(run.path)
            if stamp != run.stamp:
                run.stamp, run.version = stamp, run.version + 1
        runs.sort(key=lambda run: -run.stamp[0])
        self._runs = _by_name([(run.path, run) for run in runs])
        before = {document.path: document for document in self._documents.values()}
        files = [path for folder in (*folders, *paths) for path in _files_in(folder, ".json")]
        read = [_document(path, before.get(path)) for path in files]
        documents = [document for document in read if document is not None]
        documents.sort(key=lambda document: -document.stamp[1])
        self._documents = _by_name([(document.path, document) for document in documents])


def _by_name(entries: list[tuple[Path, Found]]) -> dict[str, Found]:
    """Name entries by the shortest end of their paths that is unique."""
    named: dict[str, Found] = {}
    paths = [path for path, _ in entries]
    for path, entry in entries:
        length = 1
        while length < len(path.parts) - 1 and _shared(path, paths, length):
            length += 1
        named.setdefault("/".join(path.parts[-length:]), entry)
    return named


def _shared(path: Path, paths: list[Path], length: int) -> bool:
    return sum(other.parts[-length:] == path.parts[-length:] for other in paths) > 1


def _named(entries: dict[str, Found], name: str, what: str) -> Found:
    if name in entries:
        return entries[name]
    names = ", ".join(list(entries)[:5]) or "none"
    raise NotFound(
        f"there is no {what} {name!r:.80}; known are {names}{did_you_mean(name, entries)}"
    )


def _runs_in(folder: Path) -> list[Path]:
    if is_run(folder):
        return [folder]
    return [path for name in _names(folder) if is_run(path := folder / name)]


def _stamp_of_run(path: Path) -> tuple[float, int]:
    """Return when a run's files were last written, and a hash that changes with them."""
    files = [path / name for name in _GROWING]
    files += [
        path / HOSTS_FOLDER / host / name for host in _names(path / HOSTS_FOLDER) for name in _HOST
    ]
    stats = [_stat(file) for file in files]
    newest = max((stat[1] for stat in stats if stat), default=0.0)
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
    """Return the document in a file, recognized by the "schema" key at its beginning."""
    stamp = _stat(path)
    if stamp is None or not 0 < stamp[0] <= LARGEST_DOCUMENT:
        return None
    if before is not None and before.stamp == stamp:
        return before
    try:
        with open_plain(path, inside=path.parent) as file:
            schema = _SCHEMA.search(file.read(256))
    except OSError:
        return None
    kind = _KINDS.get(schema[1]) if schema else None
    return KeptDocument(kind, path, stamp) if kind else None
