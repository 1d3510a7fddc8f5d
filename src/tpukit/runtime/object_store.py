"""Objects below an address (gs://, s3://, memory:// …), through fsspec.

Listings are never cached, because other processes write to the same place. Errors of a store become
two kinds: `TPUValidationError` for an address, bucket or permission that a user must fix, and
`TPUStorageError` for a store that may work again later.
"""

import logging
import os
import re
import secrets
import socket
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from ..errors import MissingExtraError, TPUStorageError, TPUValidationError

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
# The second slash is missing where an address went through a `Path`.
_SHORTENED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
_GOOGLE = ("gs", "gcs")
_GOOGLE_HOST = "storage.googleapis.com"
_LOCAL = ("file", "local")
# Names of permissions, for the message of a refused request.
_PERMISSIONS = {
    "gs": "storage.objects.list, get, create and delete (the role Storage Object User, "
    "roles/storage.objectUser); log in with 'gcloud auth application-default login', or set "
    "GOOGLE_APPLICATION_CREDENTIALS to a key that has them",
    "s3": "s3:ListBucket, GetObject, PutObject and DeleteObject",
}


def is_address(path: object) -> bool:
    """Return whether a path is the address of a store, such as gs://bucket/run."""
    return isinstance(path, str) and _ADDRESS.match(path) is not None


def check_address(path: str) -> str:
    """Return a path or an address that can be used; open nothing.

    Raises:
        ValueError: It is an address that lost a slash, or of a kind that is not known.
    """
    if _SHORTENED.match(path):
        raise ValueError(f"expected two slashes in the address '{path}', but got one")
    if is_address(path):
        import fsspec

        protocol, _, rest = path.partition("://")
        if protocol in _LOCAL:
            raise ValueError(f"expected a path without {protocol}://, because it is a local folder")
        if protocol not in fsspec.available_protocols():
            raise ValueError(f"expected an address such as gs://bucket/run, but got {protocol}://")
        if not rest.strip("/"):
            raise ValueError(f"expected a bucket and a folder after {protocol}://")
    return path


@lru_cache(maxsize=8)
def open_files(protocol: str) -> Any:
    """Return fsspec's file system for a protocol, without cached listings.

    Raises:
        MissingExtraError: The package for gs:// is not installed.
        TPUValidationError: The package for another protocol is not installed, or there is no
            network.
    """
    import fsspec

    if protocol not in _GOOGLE:
        try:
            return fsspec.filesystem(protocol, use_listings_cache=False)
        except ImportError as error:
            raise TPUValidationError(f"{protocol}:// addresses cannot be used: {error}.") from None
    try:
        # gcsfs's own class, because the registered one calls another API for every bucket.
        from gcsfs.core import GCSFileSystem
    except ImportError:
        raise MissingExtraError("data", needed_for="gs:// paths", module="gcsfs") from None
    _refuse_without_network()
    logger = logging.getLogger("gcsfs")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)  # it logs a traceback of every error it raises
    return GCSFileSystem(use_listings_cache=False)


def _refuse_without_network() -> None:
    """Raise at once without a network, because gcsfs would retry for a minute."""
    if os.environ.get("STORAGE_EMULATOR_HOST") or os.environ.get("GOOGLE_CLOUD_UNIVERSE_DOMAIN"):
        return
    try:
        socket.getaddrinfo(_GOOGLE_HOST, 443)
    except OSError as error:
        raise TPUValidationError(
            f"gs:// paths cannot be reached from here: {_GOOGLE_HOST} is not found "
            f"({error.strerror}). Check the network, or use a path on this machine."
        ) from None


@dataclass(frozen=True)
class StoredObject:
    """What a listing reports about an object.

    Attributes:
        size: Bytes.
        modified: Unix seconds by the store's own clock; 0.0 if the store does not report it.
    """

    size: int
    modified: float


class ObjectStore:
    """The objects below one address; names are relative to the address.

    Args:
        address: Such as gs://bucket/run.

    Raises:
        MissingExtraError: The package for gs:// is not installed.
        TPUValidationError: The address cannot be used.
    """

    def __init__(self, address: str) -> None:
        try:
            check_address(address)
        except ValueError as error:
            raise TPUValidationError(f"{address} cannot be used: {error}.") from None
        self.address = address.rstrip("/")
        self._protocol, _, root = self.address.partition("://")
        self._root = root
        self._files: Any = open_files(self._protocol)

    def objects(self, folder: str) -> dict[str, StoredObject]:
        """Return all objects below a folder, by name; empty if there are none."""
        with self._explained("listed"):
            entries: dict[str, Any] = self._files.find(self._path(folder), detail=True)
        before = f"{self._root}/"
        found: dict[str, StoredObject] = {}
        for path, entry in entries.items():
            name = path.lstrip("/").removeprefix(before)
            found[name] = StoredObject(int(entry.get("size") or 0), _modified(entry))
        return found

    def names(self, folder: str = "") -> list[str]:
        """Return the names directly in a folder; empty if there is no such folder."""
        try:
            with self._explained("read"):
                entries: list[str] = self._files.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        own = self._path(folder).strip("/")
        paths = {path.strip("/") for path in entries} - {own}
        return sorted(path.split("/")[-1] for path in paths)

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes of an object, or some of them.

        Raises:
            FileNotFoundError: There is no such object.
        """
        with self._explained("read"):
            return self._files.cat_file(self._path(name), start=start, end=end)

    def write(self, name: str, content: bytes) -> None:
        """Write an object; it appears when all of it has arrived."""
        with self._explained("written"):
            self._write(name, content, "overwrite")

    def create(self, name: str, content: bytes) -> bool:
        """Write an object unless it exists; return whether it was written.

        gs:// and s3:// decide it by a condition of the request, so of two processes that create the
        same object one gets False.
        """
        with self._explained("written"):
            try:
                self._write(name, content, "create")
            except FileExistsError:
                return False
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects; one that does not exist is no error."""
        for name in names:
            try:
                with self._explained("deleted"):
                    self._files.rm_file(self._path(name))
            except FileNotFoundError:
                continue

    def modified(self, name: str) -> float:
        """Return when an object was last written, as `StoredObject.modified`.

        Raises:
            FileNotFoundError: There is no such object.
        """
        with self._explained("read"):
            return _modified(self._files.info(self._path(name)))

    def try_access(self, folder: str) -> float:
        """Write, list, read and delete a small object; return the time by the store's clock.

        Raises:
            TPUValidationError: The bucket does not exist, or a permission is missing.
            TPUStorageError: The store cannot be reached.
        """
        name, content = f"{folder}/trial-{secrets.token_hex(8)}", b"a trial\n"
        self.write(name, content)
        try:
            listed = self.objects(folder).get(name)
            if listed is None or self.read(name) != content:
                raise TPUStorageError(
                    f"{self.address} does not return an object that was just written; expected a "
                    "store with consistent listings. Choose another run_dir."
                )
        except FileNotFoundError:
            raise TPUStorageError(
                f"{self.address} lost an object that was just written; choose another run_dir."
            ) from None
        self.remove([name])
        return listed.modified

    def _write(self, name: str, content: bytes, mode: str) -> None:
        try:
            self._files.pipe_file(self._path(name), content, mode=mode)
        except FileNotFoundError as error:
            raise self._no_bucket() from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _no_bucket(self) -> TPUValidationError:
        bucket = f"{self._protocol}://{self._root.split('/')[0]}"
        make = f" (gcloud storage buckets create {bucket})" if self._protocol in _GOOGLE else ""
        return TPUValidationError(
            f"There is no bucket {bucket}; create it{make}, or correct the address {self.address}."
        )

    @contextmanager
    def _explained(self, done: str) -> Generator[None]:
        """Turn errors of the store into tpukit's; missing objects stay FileNotFoundError."""
        try:
            yield
        except FileNotFoundError as error:
            if done == "listed":
                raise self._no_bucket() from error
            raise
        except (TPUValidationError, TPUStorageError, FileExistsError):
            raise
        except Exception as error:
            if _is_refusal(error):
                needed = _PERMISSIONS.get("gs" if self._protocol in _GOOGLE else self._protocol, "")
                raise TPUValidationError(
                    f"{self.address} may not be {done} ({_first_line(error)}); the run needs "
                    f"{needed or 'permission to list, read, write and delete there'}."
                ) from error
            raise TPUStorageError(
                f"{self.address} cannot be {done} now ({_first_line(error)}); check the network "
                "and the store, and start again."
            ) from error


def _is_refusal(error: Exception) -> bool:
    code = str(getattr(error, "code", ""))
    text = str(error)
    return (
        isinstance(error, PermissionError)
        or type(error).__module__.startswith("google.auth")
        or code in ("401", "403")
        or text.startswith(("Forbidden", "Unauthorized", "Access Denied"))
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_TIMES = ("mtime", "LastModified", "modified", "created")  # names in fsspec's packages


def _modified(entry: Any) -> float:
    for name in _TIMES:
        value = entry.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
