"""Files in a bucket: listing, reading ranges, downloading."""

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigError, TPUValidationError
from ...runtime.object_store import open_files
from .token_store import HEAD_BYTES, read_layout

_SCHEME = re.compile(r"(gs|gcs):/+")


def remote_url(path: str | Path) -> str | None:
    """Return a path's gs:// address, or None for a local path.

    A `Path` made from an address has lost a slash; it is the same address.

    Raises:
        ConfigError: The address has another scheme than gs.
    """
    text = str(path)
    if scheme := _SCHEME.match(text):
        return "gs://" + text[scheme.end() :]
    if "://" in text:
        raise ConfigError(
            f"'{text}' is neither a local path nor gs://…; copy the data to one of the two."
        )
    return None


@dataclass(frozen=True, eq=False)
class RemoteFile:
    """A file in a bucket; `version` changes with its content."""

    url: str
    size_bytes: int
    version: str

    @property
    def name(self) -> str:
        """The file name without its folder."""
        return self.url.rsplit("/", 1)[-1]

    def read(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes from `start` to `stop` of each span, requested in parallel."""
        with _open_bucket(self.url) as bucket:
            starts, stops = [list(ends) for ends in zip(*spans, strict=True)]
            return bucket.cat_ranges([self.url] * len(spans), starts, stops)

    def fetch(self, to: Path) -> None:
        """Download the file."""
        with _open_bucket(self.url) as bucket:
            bucket.get_file(self.url, str(to))


@dataclass(frozen=True, eq=False)
class RemoteShard:
    """Tokens in a bucket, read in ranges."""

    file: RemoteFile
    dtype: np.dtype[Any]
    num_tokens: int
    offset_bytes: int
    name: str = field(default="")

    def read(self, spans: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Read all spans in parallel."""
        width, base = self.dtype.itemsize, self.offset_bytes
        contents = self.file.read([(base + a * width, base + b * width) for a, b in spans])
        for (start, stop), content in zip(spans, contents, strict=True):
            if len(content) != (stop - start) * width:
                raise TPUValidationError(
                    f"{self.name} returned {len(content)} bytes for {stop - start} tokens, "
                    "because it "
                    "changed while it was read. Open the data again."
                )
        return [np.frombuffer(content, self.dtype) for content in contents]


def open_remote_shard(file: RemoteFile, *, dtype: str | None = None) -> RemoteShard:
    """Open a token file in a bucket by its header.

    Raises:
        TPUValidationError: The file is not of one-dimensional integers, or is damaged.
    """
    head = file.read([(0, min(HEAD_BYTES, file.size_bytes))])[0] if file.size_bytes else b""
    layout = read_layout(file.url, head, file.size_bytes, dtype=dtype)
    return RemoteShard(file, layout.dtype, layout.num_tokens, layout.offset_bytes, file.url)


def list_remote(url: str) -> tuple[RemoteFile, ...]:
    """Return the file at `url`, or the files directly in that folder; empty if there is none.

    Raises:
        ConfigError: The credentials do not allow reading it.
    """
    with _open_bucket(url) as bucket:
        try:
            entries = bucket.ls(url, detail=True)
        except FileNotFoundError:
            return ()
    files = [entry for entry in entries if entry["type"] == "file" and entry["size"]]
    return tuple(
        RemoteFile(
            "gs://" + entry["name"],
            int(entry["size"]),
            str(entry.get("etag") or entry.get("generation") or entry.get("mtime")),
        )
        for entry in sorted(files, key=lambda entry: entry["name"])
    )


@contextmanager
def _open_bucket(url: str) -> Generator[Any]:
    """Yield the bucket's file system, and turn its errors into tpukit's."""
    bucket = open_files("gs")
    from aiohttp import ClientError
    from gcsfs.retry import HttpError

    try:
        yield bucket
    except FileNotFoundError:
        raise TPUValidationError(
            f"{url} does not exist; list the folder with 'gcloud storage ls'."
        ) from None
    except HttpError as error:
        if error.code not in (401, 403):
            raise TPUValidationError(f"{url} cannot be read: {error.message}.") from None
        raise _no_access(url) from None
    except (OSError, ClientError) as error:
        if not str(error).startswith("Forbidden"):
            raise TPUValidationError(f"{url} cannot be read: {error}.") from None
        raise _no_access(url) from None


def _no_access(url: str) -> ConfigError:
    return ConfigError(
        f"{url} may not be read with the credentials found here. Run 'gcloud auth "
        "application-default login', or set GOOGLE_APPLICATION_CREDENTIALS to a service account's "
        "key file with access to the bucket."
    )
