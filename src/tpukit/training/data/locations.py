"""Where data lie: a local file or folder, or one in a bucket, looked at in the same way."""

import hashlib
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from ...errors import TPUValidationError, did_you_mean
from ...runtime.files import cache_folder, private_folder, temporary_folder
from .remote import RemoteFile, list_remote, open_remote_shard, remote_url
from .shards import TokenShard, open_shard


class Location(Protocol):
    """A file, or a folder with its files."""

    @property
    def path(self) -> str:
        """The path as it was named."""
        ...

    @property
    def is_file(self) -> bool:
        """Whether it is one file."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The files directly in it, sorted; of a file, its own name."""
        ...

    def shard(self, name: str, *, dtype: str | None = None) -> TokenShard | None:
        """The token file of this name, opened; None when it is not there."""
        ...

    def content(self, name: str) -> bytes:
        """All bytes of a small file."""
        ...

    def local(self, names: Sequence[str]) -> AbstractContextManager[list[Path]]:
        """Local files with the content of these, for as long as the `with` block lasts."""
        ...

    def version(self, names: Sequence[str]) -> str:
        """Changes when one of these files does."""
        ...


class LocalFiles:
    """A file or folder on this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.path = str(path)
        self.is_file = path.is_file()
        self._folder = path.parent if self.is_file else path
        entries = [path] if self.is_file else path.iterdir()
        self.names = tuple(sorted(entry.name for entry in entries if _counts(entry)))

    def shard(self, name: str, *, dtype: str | None = None) -> TokenShard | None:
        """Map a token file into memory."""
        file = self._folder / name
        return open_shard(file, dtype=dtype) if file.is_file() else None

    def content(self, name: str) -> bytes:
        """All bytes of a small file."""
        return (self._folder / name).read_bytes()

    @contextmanager
    def local(self, names: Sequence[str]) -> Generator[list[Path]]:
        """Nothing to do: they are local already."""
        yield [self._folder / name for name in names]

    def version(self, names: Sequence[str]) -> str:
        """A version made of path, size and time of change."""
        stats = [(self._folder / name).resolve() for name in names]
        return _key(f"{file};{file.stat().st_size};{file.stat().st_mtime_ns}" for file in stats)


class RemoteFiles:
    """A file or folder in a bucket."""

    def __init__(self, url: str) -> None:
        self.path = url
        files = list_remote(url)
        self._files: dict[str, RemoteFile] = {file.name: file for file in files}
        self.is_file = len(files) == 1 and files[0].url == url.rstrip("/")
        self.names = tuple(self._files)

    def shard(self, name: str, *, dtype: str | None = None) -> TokenShard | None:
        """Look at the header of a token file; its tokens are read in ranges."""
        file = self._files.get(name)
        return None if file is None else open_remote_shard(file, dtype=dtype)

    def content(self, name: str) -> bytes:
        """All bytes of a small file."""
        file = self._files[name]
        return file.read([(0, file.size_bytes)])[0]

    @contextmanager
    def local(self, names: Sequence[str]) -> Generator[list[Path]]:
        """Fetch them into the cache, and remove them afterwards."""
        cache = private_folder(cache_folder("fetched"))
        with temporary_folder(inside=cache) as folder:
            paths = [folder / name for name in names]
            for path in paths:
                self._files[path.name].fetch(path)
            yield paths

    def version(self, names: Sequence[str]) -> str:
        """A version made of address, size and what the bucket says about the content."""
        files = [self._files[name] for name in names]
        return _key(f"{file.url};{file.size_bytes};{file.version}" for file in files)


def look_at(path: str | Path) -> Location:
    """The file or folder at `path`.

    Raises:
        TPUValidationError: There is none, or an empty one.
        ConfigError: It is in a bucket that may not be read.
    """
    url = remote_url(path)
    if url is not None:
        place: Location = RemoteFiles(url)
        if not place.names:
            raise TPUValidationError(
                f"there is nothing at {url}; look with 'gcloud storage ls {_parent(url)}'."
            )
        return place
    local = Path(path).expanduser()
    if not os.path.exists(local):  # Path.exists() minds a name that is too long
        siblings = [entry.name for entry in local.parent.iterdir()] if local.parent.is_dir() else []
        raise TPUValidationError(
            f"there is no data at {local}; give a file or a folder."
            + did_you_mean(local.name, siblings)
        )
    if not local.is_dir() and not local.is_file():
        raise TPUValidationError(f"{local} is a device; give a file or a folder.")
    try:
        place = LocalFiles(local)
    except OSError as error:
        raise TPUValidationError(f"{local} cannot be read ({error.strerror}).") from error
    if not place.names:
        raise TPUValidationError(f"the folder {local} is empty; give one that holds data.")
    return place


def _counts(entry: Path) -> bool:
    return entry.is_file() and not entry.name.startswith((".", "_"))


def _parent(url: str) -> str:
    return url.rstrip("/").rsplit("/", 1)[0] + "/"


def _key(parts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(part.encode() + b"\n")
    return digest.hexdigest()
