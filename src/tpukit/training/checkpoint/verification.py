"""Find out whether a checkpoint still is what was written."""

import errno
import time
from collections.abc import Mapping

from ...errors import TPUCheckpointError, TPUStorageError
from ...runtime.storage import PASSING_ERRORS
from .directory import CheckpointDirectory
from .files import digests
from .record import FileEntry
from .result import Verification

# Answers that say nothing about the files themselves; a sector that cannot be read does.
PASSING = (PASSING_ERRORS | {errno.EACCES, errno.EPERM}) - {errno.EIO}


def verify(
    directory: CheckpointDirectory,
    step: int,
    *,
    items: set[str] | None = None,
    share: tuple[int, int] = (0, 1),
    may_raise: bool = False,
) -> Verification:
    """Compare the files of a checkpoint with its records: all sizes, and the digests of a share.

    Args:
        directory: Where it is.
        step: Which one.
        items: Digest only what these items need; by default everything.
        share: `(index, count)`: digest every count-th file, from the index-th on.
        may_raise: Whether files that cannot be read at the moment are an error rather than a
            problem of the checkpoint, which a restore would pass over and a save replace.

    Raises:
        TPUStorageError: The files cannot be read at the moment.
    """
    started = time.monotonic()
    entries: dict[str, FileEntry] = {}
    try:
        recorded: dict[str, FileEntry] = {}
        for record in directory.records(step):
            recorded.update(record.files)
        problem = _wrong_size(recorded, directory.sizes(step))
        if problem is None:
            needed = [name for name in sorted(recorded) if _is_needed(name, items)]
            index, count = share
            entries = {name: recorded[name] for name in needed[index::count]}
            problem = _wrong_digest(entries, digests(directory.folder(step), entries))
    except (OSError, TPUCheckpointError) as error:
        if may_raise and isinstance(error, OSError) and error.errno in PASSING:
            raise TPUStorageError(
                f"Step {step} in {directory.path} cannot be read now ({error.strerror}); whether "
                "it is good is not known. Make the storage readable, and start again."
            ) from error
        problem = str(error)
    return Verification(
        step=step,
        problem=problem,
        files=len(entries),
        size_bytes=sum(entry.size_bytes for entry in entries.values()),
        elapsed_s=time.monotonic() - started,
    )


def _is_needed(name: str, items: set[str] | None) -> bool:
    # Files beside the items' folders belong to the checkpoint as a whole.
    return items is None or "/" not in name or name.split("/", 1)[0] in items


def _wrong_size(recorded: Mapping[str, FileEntry], sizes: Mapping[str, int]) -> str | None:
    for name, entry in recorded.items():
        if name not in sizes:
            return f"its file {name} is missing"
        if sizes[name] != entry.size_bytes:
            return (
                f"its file {name} has {sizes[name]} bytes and was written with {entry.size_bytes}"
            )
    return None


def _wrong_digest(entries: Mapping[str, FileEntry], found: Mapping[str, str]) -> str | None:
    for name, entry in entries.items():
        if found[name] != entry.digest:
            return (
                f"its file {name} is not what was written: {found[name]}, recorded {entry.digest}"
            )
    return None
