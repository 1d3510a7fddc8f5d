"""Copies a growing folder to an object store in the background, about once per second.

A run writes its files to a local folder, and this thread sends what was added. Lines that a store
does not take wait in the local file for the next try, so an outage of the store does not stop a
run. A kill loses the lines of the last second.
"""

import logging
import os
import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import TPUError
from ..runtime.object_store import ObjectStore
from .segments import RECORDS, FileSegment, FileVersion, files_in, object_name

logger = logging.getLogger(__name__)

EVERY_S = 1.0
LARGEST_OBJECT = 32 << 20  # bytes
MERGED = 32
"""Segments of one level that become one segment of the next level."""
# Bytes before the sent ones that are compared to detect a rewritten file. Lines end with a time in
# microseconds, so that no two lines are equal.
COMPARED = 200

Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp:
    """Return numbers that change whenever a file does."""
    about = path.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns


@dataclass(frozen=True)
class _SentSegment:
    segment: FileSegment
    crc: int
    level: int = 0


@dataclass
class _SentFile:
    """What the store has of a file."""

    version: FileVersion
    size: int = 0
    before: bytes = b""
    stamp: Stamp | None = None
    segments: list[_SentSegment] = field(default_factory=list[_SentSegment])
    is_cleared: bool = False


class FolderUpload:
    """Sends a folder's files to the `records/` folder of an address, while they grow.

    Args:
        folder: The local folder; hidden files and links are left out.
        store: The run's address.
        epoch: Number of the lease; no other writer of the same files may have it.
        known: Files that came from the store, with their stamps; they are sent when they change.
    """

    def __init__(
        self,
        folder: Path,
        store: ObjectStore,
        *,
        epoch: int,
        known: Mapping[str, Stamp] | None = None,
    ) -> None:
        self._folder, self._store, self._epoch = folder, store, epoch
        self._known = dict(known or {})
        self._sent: dict[str, _SentFile] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._warned = False
        self.is_fenced = False
        self._thread = threading.Thread(target=self._run, name="tpukit-run-upload", daemon=True)

    def start(self) -> None:
        """Begin to send in the background."""
        self._thread.start()

    def flush(self) -> None:
        """Send now what was written until now.

        Raises:
            TPUStorageError: The store cannot be reached.
            TPUValidationError: The store refuses it.
        """
        with self._lock:
            if self.is_fenced:
                return
            files = dict(self._files())
            for name in [*self._sent, *self._known]:
                if name not in files:
                    self._forget(name)
            for name, path in files.items():
                self._send(name, path)

    def fence(self) -> None:
        """Send nothing more, because another process writes the run now."""
        self.is_fenced = True

    def close(self) -> None:
        """Send the rest, and end the thread.

        Raises:
            TPUError: The rest could not be sent; the local folder still has it.
        """
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self.flush()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                self.flush()
                self._warned = False
            except (TPUError, OSError) as error:
                if not self._warned:
                    logger.warning("lines cannot be sent yet: %s", error)
                self._warned = True

    def _files(self) -> Iterable[tuple[str, Path]]:
        for where, folders, names in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = Path(where, name)
                if name.startswith(".") or not path.is_file():
                    continue
                if not path.is_symlink():
                    yield path.relative_to(self._folder).as_posix(), path

    def _forget(self, name: str) -> None:
        """Delete a file whose local copy was deleted."""
        self._store.remove(self._store.objects(f"{RECORDS}/{name}"))
        self._sent.pop(name, None)
        self._known.pop(name, None)

    def _send(self, name: str, path: Path) -> None:
        try:
            stamp = stamp_of(path)
            sent = self._sent.get(name)
            if stamp == (sent.stamp if sent else self._known.get(name)):
                return
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if sent is None or size < sent.size or not _continues(file.fileno(), sent):
                    rewrite = 0 if sent is None else sent.version.rewrite + 1
                    sent = _SentFile(FileVersion(self._epoch, rewrite, size))
                    self._sent[name] = sent
                if not size and not sent.segments:
                    self._put(name, sent, b"")
                while sent.size < size:
                    count = min(LARGEST_OBJECT, size - sent.size)
                    content = os.pread(file.fileno(), count, sent.size)
                    if len(content) < count:
                        return  # it was cut short meanwhile
                    self._put(name, sent, content)
        except FileNotFoundError:
            return  # it was deleted meanwhile
        sent.stamp = stamp
        if not sent.is_cleared:
            self._clear_older(name, sent)

    def _put(self, name: str, sent: _SentFile, content: bytes) -> None:
        segment = FileSegment(sent.version, sent.size, sent.size + len(content))
        self._store.write(object_name(name, segment), content)
        sent.size = segment.end
        sent.before = (sent.before + content)[-COMPARED:]
        sent.segments.append(_SentSegment(segment, zlib.crc32(content)))
        self._merge(name, sent)

    def _merge(self, name: str, sent: _SentFile) -> None:
        """Write many small segments as one, and then delete them."""
        while len(sent.segments) >= MERGED:
            last = sent.segments[-MERGED:]
            first, end = last[0].segment.start, last[-1].segment.end
            level = last[-1].level
            if any(part.level != level for part in last) or end - first > LARGEST_OBJECT:
                return
            pieces: list[bytes] = []
            with (self._folder / name).open("rb") as file:
                for part in last:
                    file.seek(part.segment.start)
                    piece = file.read(part.segment.end - part.segment.start)
                    if zlib.crc32(piece) != part.crc:
                        return  # the file was rewritten meanwhile
                    pieces.append(piece)
            content = b"".join(pieces)
            merged = FileSegment(sent.version, first, end)
            self._store.write(object_name(name, merged), content)
            sent.segments[-MERGED:] = [_SentSegment(merged, zlib.crc32(content), level + 1)]
            self._store.remove(object_name(name, part.segment) for part in last)

    def _clear_older(self, name: str, sent: _SentFile) -> None:
        """Delete the segments of older versions, now that this one is complete."""
        found = files_in(self._store.objects(f"{RECORDS}/{name}")).get(name, [])
        older = [segment for segment in found if segment.version < sent.version]
        self._store.remove(object_name(name, segment) for segment in older)
        sent.is_cleared = True


def _continues(descriptor: int, sent: _SentFile) -> bool:
    start = sent.size - len(sent.before)
    return os.pread(descriptor, len(sent.before), start) == sent.before
