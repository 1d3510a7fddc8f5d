"""The on-disk cache of compiles: written atomically, limited in size, checked when read.

Each compile is one zip file, whose members have checksums. It is written beside its final name and
then renamed, so any number of processes may read and write at once. An unreadable file is deleted
and its program compiled again. The least recently used files are deleted first.
"""

import contextlib
import json
import logging
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import TPUCacheError
from ..plain_data import JsonMapping, JsonObject
from ..runtime.files import PARTIAL, cache_folder, private_folder, refuse_shared, whole_file
from ..shown import Shown

logger = logging.getLogger(__name__)
DEFAULT_LIMIT_BYTES = 2 * 2**30
SUFFIX = ".zip"
JOB_LINK = "job-"  # prefix of the entries that map a job to its compile
_ABANDONED_S = 3600.0
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, NotImplementedError)


@dataclass(frozen=True)
class CacheSummary(Shown):
    """Number and size of the cache entries."""

    folder: Path
    entries: int
    size_bytes: int
    limit_bytes: int
    origin = "measured"
    _facts = "folder entries size_bytes limit_bytes origin"

    def __rich__(self) -> str:
        from ..hardware.figure import format_quantity

        return (
            f"{self.entries} entries, {format_quantity(self.size_bytes, 'B')} of at most "
            f"{format_quantity(self.limit_bytes, 'B')}, in {self.folder}"
        )


@dataclass(frozen=True)
class CompileCache:
    """Texts by key, in a folder.

    Attributes:
        folder: The folder.
        limit_bytes: Size limit; beyond it the least recently used entries are deleted.
    """

    folder: Path
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    @classmethod
    def default(cls) -> "CompileCache":
        """Return the user's cache, under `TPUKIT_CACHE_DIR` or the usual cache folder."""
        folder = cache_folder("compiles")
        refuse_shared(folder)
        return cls(folder)

    def load(self, key: str) -> dict[str, str] | None:
        """Return the texts stored under `key`, or None; a damaged file is deleted."""
        path = self._path(key)
        try:
            with zipfile.ZipFile(path) as archive:
                texts = {name: archive.read(name).decode() for name in archive.namelist()}
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("cannot read the compile cache: %s", error)
            return None
        except _DAMAGED as error:
            logger.warning("dropped a damaged entry of the compile cache: %s", error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        return texts

    def store(self, key: str, texts: Mapping[str, str]) -> bool:
        """Store `texts`; return False, with a warning, if they cannot be written."""
        try:
            private_folder(self.folder)
            with (
                whole_file(self._path(key)) as file,
                zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=5) as archive,
            ):
                for name, text in texts.items():
                    archive.writestr(name, text)
        except OSError as error:
            logger.warning("the compile cache cannot be written: %s", error)
            return False
        self._make_room(keep=key)
        return True

    def load_json(self, key: str) -> JsonObject | None:
        """Return the JSON data stored under `key`, or None."""
        texts = self.load(key)
        try:
            return None if texts is None else json.loads(texts["data.json"])
        except (ValueError, KeyError):
            return None

    def store_json(self, key: str, data: JsonMapping) -> bool:
        """Store JSON data under `key`."""
        return self.store(key, {"data.json": json.dumps(data)})

    def keep_newest(self, compiles: int) -> None:
        """Delete all but the most recently used compiles; links from jobs to compiles stay."""
        files = [path for _, _, path in self._files() if not path.name.startswith(JOB_LINK)]
        for path in files[: max(0, len(files) - compiles)]:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def summary(self) -> CacheSummary:
        """Return the number and size of the entries."""
        files = self._files()
        size = sum(size for _, size, _ in files)
        return CacheSummary(self.folder, len(files), size, self.limit_bytes)

    def clear(self) -> int:
        """Delete every entry and return how many files were deleted.

        Raises:
            TPUCacheError: A file cannot be deleted.
        """
        files = self._files()
        for _, _, path in files:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise TPUCacheError(
                    f"{path} cannot be deleted ({error.strerror}); check who owns the folder."
                ) from error
        return len(files)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _files(self) -> list[tuple[float, int, Path]]:
        """Return (last use, size, path) of every entry, the least recently used first."""
        found: list[tuple[float, int, Path]] = []
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.folder):
                if entry.name.endswith((SUFFIX, PARTIAL)):
                    # Another process may delete it between the listing and the look.
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat()
                        found.append((status.st_mtime, status.st_size, Path(entry.path)))
        return sorted(found)

    def _make_room(self, *, keep: str) -> None:
        files = self._files()
        newest = max((used for used, _, _ in files), default=0.0)
        total = sum(size for _, size, _ in files)
        for used, size, path in files:
            abandoned = path.suffix == PARTIAL and newest - used > _ABANDONED_S
            over = total > self.limit_bytes and path.suffix != PARTIAL
            if abandoned or (over and path != self._path(keep)):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                    total -= size
