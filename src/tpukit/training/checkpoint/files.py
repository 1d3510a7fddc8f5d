"""The files of a checkpoint with their sizes and digests, on disk and in a bucket alike."""

import contextlib
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etils import epath

from ...errors import MissingExtraError, TPUCheckpointError
from ...runtime.files import write_text

BLOCK_BYTES = 1 << 22
# crc32 of a cached file runs at some GB/s a core: a few readers keep a disk busy.
READERS = 4


def in_bucket(path: epath.Path) -> bool:
    """Whether a path is in Cloud Storage rather than in a file system."""
    return os.fspath(path).startswith("gs://")


def file_sizes(folder: epath.Path) -> dict[str, int]:
    """Every file under a folder: its path relative to it, and its size in bytes.

    Other processes may be writing there: a file that goes while it is looked at, such as one that
    is about to get its name, is none.
    """
    if in_bucket(folder):
        return {name: int(entry["size"]) for name, entry in _objects(folder).items()}
    root = os.fspath(folder)
    found: dict[str, int] = {}
    for where, _, names in os.walk(root):
        for name in names:
            path = os.path.join(where, name)
            with contextlib.suppress(FileNotFoundError):
                found[os.path.relpath(path, root)] = os.path.getsize(path)
    return found


def digests(folder: epath.Path, names: Iterable[str]) -> dict[str, str]:
    """The digest of each file, as "algorithm:value"; "missing" where there is no such file.

    On disk the bytes are read. A bucket computes a crc32c of every object it is given and
    checks it on its own, so there the stored one is taken and nothing is read twice.
    """
    wanted = list(names)
    if in_bucket(folder):
        objects = _objects(folder)
        return {name: _stored_digest(objects.get(name)) for name in wanted}
    with ThreadPoolExecutor(READERS, thread_name_prefix="tpukit-digest") as readers:
        found = readers.map(lambda name: _digest_of_file(os.path.join(folder, name)), wanted)
        return dict(zip(wanted, found, strict=True))


def write_whole(path: epath.Path, text: str) -> None:
    """Write a file so that after a crash it is there whole or not at all."""
    if in_bucket(path):
        path.write_text(text)  # an object appears only when its upload is complete
        return
    write_text(Path(path), text, durable=True)


def forget_listings(path: epath.Path) -> None:
    """Drop what fsspec remembers of a bucket: Orbax's writes do not pass through it."""
    if in_bucket(path):
        _bucket_files().invalidate_cache()


def remove_folder(folder: epath.Path) -> None:
    """Delete a folder and all in it; one that is already gone is fine."""
    forget_listings(folder)
    with contextlib.suppress(FileNotFoundError):
        folder.rmtree()


def check_bucket(path: epath.Path) -> None:
    """Find out now, in one request, whether the bucket is there and may be read.

    Raises:
        TPUCheckpointError: It is not there, or the credentials do not open it.
    """
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError

    bucket, _, prefix = os.fspath(path).removeprefix("gs://").partition("/")
    try:
        _bucket_files().call("GET", "b/{}/o", bucket, prefix=prefix, maxResults=1, json_out=True)
    except FileNotFoundError as error:
        raise TPUCheckpointError(
            f"There is no bucket gs://{bucket}; create it (gcloud storage buckets create "
            f"gs://{bucket}), or correct the address {path}."
        ) from error
    except (HttpError, GoogleAuthError, OSError) as error:
        raise TPUCheckpointError(
            f"The bucket gs://{bucket} cannot be read: {error}. Log in (gcloud auth "
            "application-default login), or set GOOGLE_APPLICATION_CREDENTIALS to a key that may "
            "read and write it."
        ) from error


def _digest_of_file(path: str) -> str:
    block = memoryview(bytearray(BLOCK_BYTES))
    value = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(block):
                value = zlib.crc32(block[:count], value)
    except FileNotFoundError:
        return "missing"
    return f"crc32:{value:08x}"


def _stored_digest(entry: Mapping[str, Any] | None) -> str:
    return "missing" if entry is None else f"crc32c:{entry['crc32c']}"


def _objects(folder: epath.Path) -> dict[str, Mapping[str, Any]]:
    root = os.fspath(folder).removeprefix("gs://").rstrip("/") + "/"
    forget_listings(folder)
    found: dict[str, Mapping[str, Any]] = _bucket_files().find(root, detail=True)
    return {name.removeprefix(root): entry for name, entry in found.items()}


def _bucket_files() -> Any:
    import fsspec

    try:
        return fsspec.filesystem("gs")
    except ImportError as error:
        raise MissingExtraError(
            "gcp", needed_for="A checkpoint in gs://", module="gcsfs"
        ) from error
