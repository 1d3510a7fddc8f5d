"""Comparison of a checkpoint's files with the records of what was written."""

import errno
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rich.text import Text

from ...errors import TPUCheckpointError, TPUStorageError
from ...runtime.files import PASSING_ERRORS
from ...shown import Shown
from .directory import CheckpointDirectory
from .record import FileEntry, digests

# Errors of the storage that do not mean damaged files; an unreadable sector (EIO) does.
PASSING = (PASSING_ERRORS | {errno.EACCES, errno.EPERM}) - {errno.EIO}


@dataclass(frozen=True, kw_only=True)
class Verification(Shown):
    """The result of comparing a checkpoint with its records (origin: measured).

    Attributes:
        step: The checkpoint's step.
        problem: The first difference, or None.
        files: How many files this process compared.
        size_bytes: Their size together.
        elapsed_s: Duration of the comparison.
    """

    step: int
    problem: str | None
    files: int
    size_bytes: int
    elapsed_s: float
    _facts = ("step", "good", "problem", "files", "size_bytes", "elapsed_s")

    @property
    def good(self) -> bool:
        """Whether no difference was found."""
        return self.problem is None

    def __rich__(self) -> Text:
        verdict = [("good", "")] if self.good else [("not good", "red"), (f": {self.problem}", "")]
        return Text.assemble(
            f"step {self.step}: ",
            *verdict,
            f" ({self.files} files, {self.size_bytes / 1e9:.3f} GB, "
            f"{self.elapsed_s:.2f} s, measured)",
        )


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
        directory: The checkpoint folder.
        step: The checkpoint's step.
        items: Digest only the files of these items; by default all.
        share: `(index, count)`: digest every count-th file, from the index-th on.
        may_raise: Raise for files that cannot be read now. Otherwise the checkpoint counts as
            damaged, so that a restore skips it and a save replaces it.

    Raises:
        TPUStorageError: The files cannot be read now.
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
                f"Step {step} in {directory.path} cannot be read now ({error.strerror}), so it "
                "could not be verified. Make the storage readable, and start again."
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
    # Files beside the items' folders belong to all items.
    return items is None or "/" not in name or name.split("/", 1)[0] in items


def _wrong_size(recorded: Mapping[str, FileEntry], sizes: Mapping[str, int]) -> str | None:
    for name, entry in recorded.items():
        if name not in sizes:
            return f"its file {name} is missing"
        if sizes[name] != entry.size_bytes:
            return (
                f"its file {name} has {sizes[name]} bytes, but was written with {entry.size_bytes}"
            )
    return None


def _wrong_digest(entries: Mapping[str, FileEntry], actual: Mapping[str, str]) -> str | None:
    for name, entry in entries.items():
        if actual[name] != entry.digest:
            return f"its file {name} has digest {actual[name]}, expected {entry.digest}"
    return None
