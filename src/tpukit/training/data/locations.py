"""Data locations: local files and folders or buckets, and the kind of data in them."""

import hashlib
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...errors import TPUValidationError, did_you_mean
from ...plain_data import parse_json
from ...runtime.files import cache_folder, private_folder, temporary_folder
from .remote import RemoteFile, list_remote, open_remote_shard, remote_url
from .token_folder import MANIFEST
from .token_store import TokenShard, open_shard


class Location(Protocol):
    """A file, or a folder with its files."""

    @property
    def path(self) -> str:
        """The path as the user gave it."""
        ...

    @property
    def is_file(self) -> bool:
        """Whether it is a single file."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files directly in the folder, sorted; or the file's name."""
        ...

    def shard(self, name: str, *, dtype: str | None = None) -> TokenShard | None:
        """Open the token file of this name; None if it does not exist."""
        ...

    def content(self, name: str) -> bytes:
        """Read all bytes of a small file."""
        ...

    def local(self, names: Sequence[str]) -> AbstractContextManager[list[Path]]:
        """Return local copies of these files for the duration of the `with` block."""
        ...

    def version(self, names: Sequence[str]) -> str:
        """Return a text that changes when one of these files changes."""
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
        """Read all bytes of a small file."""
        return (self._folder / name).read_bytes()

    @contextmanager
    def local(self, names: Sequence[str]) -> Generator[list[Path]]:
        """Return the files, which are local already."""
        yield [self._folder / name for name in names]

    def version(self, names: Sequence[str]) -> str:
        """Hash path, size and modification time of the files."""
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
        """Read the header of a token file; its tokens are read in ranges."""
        file = self._files.get(name)
        return None if file is None else open_remote_shard(file, dtype=dtype)

    def content(self, name: str) -> bytes:
        """Read all bytes of a small file."""
        file = self._files[name]
        return file.read([(0, file.size_bytes)])[0]

    @contextmanager
    def local(self, names: Sequence[str]) -> Generator[list[Path]]:
        """Download the files into the cache, and remove them afterwards."""
        cache = private_folder(cache_folder("fetched"))
        with temporary_folder(inside=cache) as folder:
            paths = [folder / name for name in names]
            for path in paths:
                self._files[path.name].fetch(path)
            yield paths

    def version(self, names: Sequence[str]) -> str:
        """Hash address, size and the bucket's version of the files."""
        files = [self._files[name] for name in names]
        return _key(f"{file.url};{file.size_bytes};{file.version}" for file in files)


def open_location(path: str | Path) -> Location:
    """Return the file or folder at `path`.

    Raises:
        TPUValidationError: It does not exist, or is an empty folder.
        ConfigError: It is in a bucket without access.
    """
    url = remote_url(path)
    if url is not None:
        location: Location = RemoteFiles(url)
        if not location.names:
            raise TPUValidationError(
                f"there is nothing at {url}; list the folder with 'gcloud storage ls "
                f"{_parent(url)}'."
            )
        return location
    local = Path(path).expanduser()
    if not os.path.exists(local):  # Path.exists() raises for a name that is too long
        siblings = [entry.name for entry in local.parent.iterdir()] if local.parent.is_dir() else []
        raise TPUValidationError(
            f"there is no data at {local}; give a file or a folder."
            + did_you_mean(local.name, siblings)
        )
    if not local.is_dir() and not local.is_file():
        raise TPUValidationError(f"{local} is neither file nor folder; give a file or a folder.")
    try:
        location = LocalFiles(local)
    except OSError as error:
        raise TPUValidationError(
            f"{local} cannot be read ({error.strerror}); check its permissions."
        ) from error
    if not location.names:
        raise TPUValidationError(f"the folder {local} is empty; give one with data.")
    return location


def _counts(entry: Path) -> bool:
    return entry.is_file() and not entry.name.startswith((".", "_"))


def _parent(url: str) -> str:
    return url.rstrip("/").rsplit("/", 1)[0] + "/"


def _key(parts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(part.encode() + b"\n")
    return digest.hexdigest()


TEXT_KINDS = ("text", "jsonl", "array_record", "huggingface")

_SUFFIXES = {
    "tokens": (".npy", ".bin"),
    "jsonl": (".jsonl", ".jsonl.gz", ".ndjson"),
    "text": (".txt", ".txt.gz", ".md"),
    "array_record": (".array_record", ".arrayrecord"),
}
_HUGGINGFACE, _SPLIT_LIST = ("dataset_info.json", "state.json"), "dataset_dict.json"
# Names of splits; files of different splits are not shards of one data set.
_SPLITS = ("train", "val", "valid", "validation", "test", "eval", "dev")


@dataclass(frozen=True)
class DataKind:
    """A kind of data, and its files in reading order."""

    name: str
    files: tuple[str, ...]


def kind_of(location: Location) -> DataKind:
    """Return the kind of data at a location, by file names.

    Raises:
        TPUValidationError: The kind is unknown, or there are several kinds or splits.
    """
    names = location.names
    if not location.is_file:
        if MANIFEST in names:
            return DataKind("prepared", (MANIFEST,))
        if _SPLIT_LIST in names:
            raise _name_a_split(location)
        if any(name in names for name in _HUGGINGFACE):
            return DataKind("huggingface", names)
        if "tokens.npy" in names:
            return DataKind("tokens", ("tokens.npy",))
    elif names[0] == MANIFEST:
        raise TPUValidationError(f"{location.path} describes a folder; give the folder itself.")
    by_kind: dict[str, list[str]] = {}
    for name in names:
        for kind, suffixes in _SUFFIXES.items():
            if name.lower().endswith(suffixes):
                by_kind.setdefault(kind, []).append(name)
    if not by_kind:
        raise TPUValidationError(
            f"{location.path} contains no data of a known kind ({', '.join(names[:3])}"
            f"{', …' if len(names) > 3 else ''}); known are .npy and .bin tokens, .jsonl, .txt, "
            ".array_record, a folder of Hugging Face datasets, and what 'tpukit data prepare' "
            "writes; for models that read no tokens, an .npz file, a folder with one folder of "
            "images per class, and file.py:function."
        )
    if len(by_kind) > 1:
        raise TPUValidationError(
            f"{location.path} contains several kinds of data ("
            + ", ".join(f"{files[0]}: {kind}" for kind, files in by_kind.items())
            + "); name one file, or keep each kind in a separate folder."
        )
    kind, files = next(iter(by_kind.items()))
    _refuse_splits(location, files)
    return DataKind(kind, tuple(files))


def _name_a_split(location: Location) -> TPUValidationError:
    try:
        splits = parse_json(location.content(_SPLIT_LIST))["splits"]
    except (ValueError, KeyError, TypeError):
        splits = []
    return TPUValidationError(
        f"{location.path} contains the splits {', '.join(splits) or '(unreadable)'} of a Hugging "
        "Face "
        f"data set; name one: {location.path}/{splits[0] if splits else 'train'}."
    )


def _refuse_splits(location: Location, files: list[str]) -> None:
    splits = {name for name in files if name.split(".")[0].split("-")[0].lower() in _SPLITS}
    beginnings = {name.split(".")[0].split("-")[0].lower() for name in splits}
    if len(beginnings) > 1:
        raise TPUValidationError(
            f"{location.path} contains {' and '.join(sorted(splits)[:4])}, which look like splits; "
            f"training on all would leak test data. Name one: {location.path}/{sorted(splits)[0]}."
        )
