"""The files of a checkpoint, and the records that make it complete.

Each process writes one record after all arrays are committed. It contains the digests of its share
of the files, so that no host reads a pod's whole checkpoint, and its position in the data. A
checkpoint counts only when the records of all processes exist: they are the commit marker. Files
are on disk or in a bucket.
"""

import contextlib
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from etils import epath

from ...errors import MissingExtraError, TPUCheckpointError
from ...plain_data import parse_json
from ...runtime.files import write_text
from .named_arrays import LeafShape

FOLDER = "tpukit"
FORMAT = 1
NAME = re.compile(r"process-(\d+)-of-(\d+)\.json")
BLOCK_BYTES = 1 << 22
READERS = 4  # crc32 runs at some GB/s per core, so a few readers keep a disk busy


@dataclass(frozen=True)
class FileEntry:
    """Size and digest of a file when it was committed."""

    size_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """The description of a checkpoint that one process writes.

    Attributes:
        step: The number of steps taken before the checkpoint.
        process: The process that wrote this record.
        processes: The number of records that the checkpoint has.
        files: This process's share of the checkpoint's files.
        data: Position of this process's data stream.
        metadata: The caller's metadata; the same in every record.
        items: Shapes of the checkpoint's arrays by item; the same in every record.
    """

    step: int
    process: int
    processes: int
    files: dict[str, FileEntry] = field(default_factory=dict[str, FileEntry])
    data: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    items: dict[str, list[LeafShape]] = field(default_factory=dict[str, list[LeafShape]])

    def write(self, step_folder: epath.Path) -> None:
        """Write the record atomically."""
        folder = step_folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        body = _canonical({"format": FORMAT, **asdict(self)})
        document = f'{{"sha256": "{_sha256(body)}", "record": {body}}}\n'
        write_atomically(folder / record_name(self.process, self.processes), document)

    @classmethod
    def read(cls, path: epath.Path) -> "Record":
        """Read a record.

        Raises:
            TPUCheckpointError: It is damaged, or of a format that this version cannot read.
        """
        try:
            document: dict[str, Any] = parse_json(path.read_bytes())
            saved: dict[str, Any] = document["record"]
            intact = document["sha256"] == _sha256(_canonical(saved))
        except (ValueError, KeyError, TypeError) as error:
            raise TPUCheckpointError(f"the record {path.name} cannot be read: {error}") from error
        if not intact:
            raise TPUCheckpointError(f"the record {path.name} was changed after it was written")
        if saved["format"] != FORMAT:
            raise TPUCheckpointError(
                f"the record {path.name} has format {saved['format']}, but this tpukit reads "
                f"format {FORMAT}"
            )
        return cls(
            step=saved["step"],
            process=saved["process"],
            processes=saved["processes"],
            files={name: FileEntry(**entry) for name, entry in saved["files"].items()},
            data=saved["data"],
            metadata=saved["metadata"],
            items={
                name: [LeafShape.from_dict(leaf) for leaf in leaves]
                for name, leaves in saved["items"].items()
            },
        )


def record_name(process: int, processes: int) -> str:
    """Return the file name of one process's record."""
    return f"process-{process:05d}-of-{processes:05d}.json"


def missing_records(names: list[str]) -> str | None:
    """Return why these records do not make a complete checkpoint, or None if they do."""
    pairs = {(int(match[1]), int(match[2])) for name in names if (match := NAME.fullmatch(name))}
    if not pairs:
        return "it was not finished: no process has recorded its part"
    counts = {processes for _, processes in pairs}
    if len(counts) > 1:
        return f"its records disagree: {' and '.join(map(str, sorted(counts)))} processes"
    expected = counts.pop()
    absent = sorted(set(range(expected)) - {process for process, _ in pairs})
    if absent:
        shown = ", ".join(map(str, absent[:8])) + (", …" if len(absent) > 8 else "")
        return f"it was not finished: of {expected} processes, {shown} left no record"
    return None


def plain_json(value: Mapping[str, Any], *, what: str) -> dict[str, Any]:
    """Return a copy of `value`, made through JSON.

    Raises:
        TPUCheckpointError: JSON cannot represent it.
    """
    try:
        copied = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TPUCheckpointError(
            f"{what}= must be plain data (dicts, lists, strings, numbers): {error}. Pass arrays as "
            "separate items, save(step, name=array)."
        ) from error
    return copied


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def in_bucket(path: epath.Path) -> bool:
    """Return whether a path is in Cloud Storage rather than in a file system."""
    return os.fspath(path).startswith("gs://")


def file_sizes(folder: epath.Path) -> dict[str, int]:
    """Return the size in bytes of every file under a folder, by path relative to the folder.

    Other processes may be writing there. A file that disappears meanwhile, such as a temporary one
    that is renamed, is left out.
    """
    if in_bucket(folder):
        return {name: int(entry["size"]) for name, entry in _objects(folder).items()}
    root = os.fspath(folder)
    sizes: dict[str, int] = {}
    for where, _, names in os.walk(root):
        for name in names:
            path = os.path.join(where, name)
            with contextlib.suppress(FileNotFoundError):
                sizes[os.path.relpath(path, root)] = os.path.getsize(path)
    return sizes


def digests(folder: epath.Path, names: Iterable[str]) -> dict[str, str]:
    """Return the digest of each file as "algorithm:value"; "missing" for a missing file.

    Files on disk are read. A bucket computes and checks a crc32c of every object itself, so its
    stored digest is returned without reading the object.
    """
    wanted = list(names)
    if in_bucket(folder):
        objects = _objects(folder)
        return {name: _stored_digest(objects.get(name)) for name in wanted}
    with ThreadPoolExecutor(READERS, thread_name_prefix="tpukit-digest") as readers:
        values = readers.map(lambda name: _digest_of_file(os.path.join(folder, name)), wanted)
        return dict(zip(wanted, values, strict=True))


def write_atomically(path: epath.Path, text: str) -> None:
    """Write a file so that a crash leaves all of it or none."""
    if in_bucket(path):
        path.write_text(text)  # an object appears only when its upload is complete
        return
    write_text(Path(path), text, durable=True)


def forget_listings(path: epath.Path) -> None:
    """Drop fsspec's cached bucket listings, because Orbax writes without fsspec."""
    if in_bucket(path):
        _bucket_files().invalidate_cache()


def remove_folder(folder: epath.Path) -> None:
    """Delete a folder with its content; a missing folder is no error."""
    forget_listings(folder)
    with contextlib.suppress(FileNotFoundError):
        folder.rmtree()


def check_bucket(path: epath.Path) -> None:
    """Check with one request that the bucket exists and may be read.

    Raises:
        TPUCheckpointError: The bucket is missing, or the credentials do not allow reading it.
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
            "read and write the bucket."
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
    objects: dict[str, Mapping[str, Any]] = _bucket_files().find(root, detail=True)
    return {name.removeprefix(root): entry for name, entry in objects.items()}


def _bucket_files() -> Any:
    import fsspec

    try:
        return fsspec.filesystem("gs")
    except ImportError as error:
        raise MissingExtraError(
            "data", needed_for="A checkpoint in gs://", module="gcsfs"
        ) from error
