"""The folder that holds a run's checkpoints: which are whole, which are left-overs, who writes."""

import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from etils import epath

from ...errors import TPUCheckpointError, TPUStorageError, TPUValidationError
from ...runtime.writer_lock import WriterLock
from . import record
from .files import check_bucket, file_sizes, forget_listings, in_bucket, remove_folder
from .record import Record

logger = logging.getLogger(__name__)

# Says that the folder is ours; the process that writes to it holds a lock on it.
MARK = ".tpukit-writer"
# How Orbax names what it has not committed yet.
UNFINISHED = ".orbax-checkpoint-tmp"


class CheckpointDirectory:
    """Checkpoints in a folder or bucket, one sub-folder a step, named by its number."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text = os.fspath(path)
        if "://" in text and not text.startswith("gs://"):
            raise TPUCheckpointError(
                f"Checkpoints cannot be kept at '{text}'; give a folder or a gs:// address."
            )
        self.path = epath.Path(text if "://" in text else os.path.abspath(os.path.expanduser(text)))
        self._lock: WriterLock | None = None
        self._taken = False
        self._reached = False
        # Complete, and yet found to be not what was written, with the reason.
        self.damaged: dict[int, str] = {}

    def folder(self, step: int) -> epath.Path:
        """Where the checkpoint of a step is."""
        return self.path / str(step)

    def found_steps(self) -> list[int]:
        """Every step that has a folder, finished or not, oldest first."""
        names = self._names()
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def steps(self) -> list[int]:
        """Every step whose checkpoint was finished, oldest first."""
        return [step for step in self.found_steps() if self.unfinished(step) is None]

    def good_steps(self) -> list[int]:
        """Every finished step not known to be damaged, oldest first."""
        return [step for step in self.steps() if step not in self.damaged]

    def unfinished(self, step: int) -> str | None:
        """Why a step's checkpoint does not count, or None when all its records are there."""
        folder = self.folder(step) / record.FOLDER
        forget_listings(folder)
        if not self.folder(step).exists():
            return "it is not there"
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        return record.missing_records(names)

    def records(self, step: int) -> list[Record]:
        """The records of all processes that wrote a checkpoint, by process.

        Raises:
            TPUCheckpointError: One is damaged or missing.
        """
        if reason := self.unfinished(step):
            raise TPUCheckpointError(reason)
        paths = sorted((self.folder(step) / record.FOLDER).iterdir(), key=lambda path: path.name)
        return [Record.read(path) for path in paths if record.NAME.fullmatch(path.name)]

    def sizes(self, step: int) -> dict[str, int]:
        """The files Orbax wrote for a step, with their sizes in bytes."""
        own = f"{record.FOLDER}/"
        found = file_sizes(self.folder(step))
        return {name: size for name, size in sorted(found.items()) if not name.startswith(own)}

    def take(self) -> None:
        """Become the one process that writes here, until `release()` or the process ends.

        Raises:
            TPUCheckpointError: Another one does, the folder holds what tpukit did not write, or
                it cannot be written.
        """
        if self._taken:
            return
        found = self.found_steps()
        mark = self.path / MARK
        if not mark.exists() and (foreign := [step for step in found if self.unfinished(step)]):
            raise TPUCheckpointError(
                f"{self.path} holds folders that tpukit did not write ({foreign[0]}); give the "
                "checkpoints a folder of their own."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if in_bucket(self.path):
                mark.write_text("checkpoints of tpukit\n")  # a bucket has no locks
            else:
                lock = WriterLock(Path(mark))
                lock.take(
                    what=f"The checkpoint folder {self.path}",
                    instead="end that run, close() that checkpointer, or give this run a folder "
                    "of its own.",
                )
                self._lock = lock
        except TPUValidationError as error:
            raise TPUCheckpointError(str(error)) from None
        except OSError as error:
            kind = TPUStorageError if found else TPUCheckpointError  # it could be written before
            raise kind(
                f"Checkpoints cannot be written to {self.path}: {error.strerror or error}. Choose "
                "a place this user may write to."
            ) from error
        self._taken = True

    def try_writing(self) -> None:
        """Make and remove a folder with a file in it, to find out now what a save would meet.

        Raises:
            OSError: Nothing can be written here now.
        """
        if in_bucket(self.path):
            return
        trial = self.path / f".{secrets.token_hex(4)}{UNFINISHED}"
        trial.mkdir()
        try:
            (trial / "trial").write_text("a full disk makes files, and refuses what is in them")
        finally:
            remove_folder(trial)

    def release(self) -> None:
        """Let others write here."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._taken = False

    def remove(self, steps: Sequence[int]) -> None:
        """Delete the checkpoints of some steps."""
        for step in steps:
            # Records first: if this process dies half-way, what is left does not count as whole.
            remove_folder(self.folder(step) / record.FOLDER)
            remove_folder(self.folder(step))
            self.damaged.pop(step, None)

    def remove_unfinished(self) -> None:
        """Delete what crashed or failed saves left behind; only the writer may."""
        for name in self._names():
            if UNFINISHED in name:
                logger.info("Removing a save that was never finished: %s", self.path / name)
                remove_folder(self.path / name)
        for step in self.found_steps():
            if reason := self.unfinished(step):
                logger.info("Removing the checkpoint of step %d: %s", step, reason)
                self.remove([step])

    def _names(self) -> list[str]:
        if in_bucket(self.path) and not self._reached:
            check_bucket(self.path)
            self._reached = True
        forget_listings(self.path)
        try:
            return [path.name for path in self.path.iterdir()] if self.path.exists() else []
        except PermissionError as error:
            raise TPUStorageError(
                f"{self.path} cannot be read ({error.strerror}); check who owns it."
            ) from error
