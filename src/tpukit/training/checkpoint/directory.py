"""A run's checkpoint folder: complete checkpoints, unfinished ones, and its one writer."""

import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from etils import epath

from ...errors import TPUCheckpointError, TPUStorageError, TPUValidationError
from ...runtime.writer_lock import WriterLock
from . import record
from .record import (
    Record,
    check_bucket,
    file_sizes,
    forget_listings,
    in_bucket,
    remove_folder,
)

logger = logging.getLogger(__name__)

# Marks a folder of tpukit; the process that writes to the folder holds a lock on this file.
MARK = ".tpukit-writer"
# Part of the name that Orbax gives to a folder before it commits it.
UNFINISHED = ".orbax-checkpoint-tmp"


class CheckpointDirectory:
    """Checkpoints in a folder or bucket, one subfolder per step, named by its number."""

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
        # Steps with complete checkpoints that failed verification, with the reason.
        self.damaged: dict[int, str] = {}

    def folder(self, step: int) -> epath.Path:
        """Return the folder of a step's checkpoint."""
        return self.path / str(step)

    def found_steps(self) -> list[int]:
        """Return every step that has a folder, finished or not, oldest first."""
        names = self._names()
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def steps(self) -> list[int]:
        """Return every step with a finished checkpoint, oldest first."""
        return [step for step in self.found_steps() if self.unfinished(step) is None]

    def good_steps(self) -> list[int]:
        """Return every finished step that is not known to be damaged, oldest first."""
        return [step for step in self.steps() if step not in self.damaged]

    def unfinished(self, step: int) -> str | None:
        """Return why a step's checkpoint is not complete, or None if all its records exist."""
        folder = self.folder(step) / record.FOLDER
        forget_listings(folder)
        if not self.folder(step).exists():
            return "it does not exist"
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        return record.missing_records(names)

    def records(self, step: int) -> list[Record]:
        """Return the records of all processes that wrote a checkpoint, by process.

        Raises:
            TPUCheckpointError: A record is damaged or missing.
        """
        if reason := self.unfinished(step):
            raise TPUCheckpointError(reason)
        paths = sorted((self.folder(step) / record.FOLDER).iterdir(), key=lambda path: path.name)
        return [Record.read(path) for path in paths if record.NAME.fullmatch(path.name)]

    def sizes(self, step: int) -> dict[str, int]:
        """Return the sizes in bytes of the files that Orbax wrote for a step."""
        records = f"{record.FOLDER}/"
        sizes = sorted(file_sizes(self.folder(step)).items())
        return {name: size for name, size in sizes if not name.startswith(records)}

    def take(self) -> None:
        """Become the only process that writes here, until `release()` or the process ends.

        Raises:
            TPUCheckpointError: Another process writes here, the folder contains checkpoints that
                tpukit did not write, or it cannot be written.
        """
        if self._taken:
            return
        steps = self.found_steps()
        mark = self.path / MARK
        if not mark.exists() and (foreign := [step for step in steps if self.unfinished(step)]):
            raise TPUCheckpointError(
                f"{self.path} contains folders that tpukit did not write ({foreign[0]}); give the "
                "checkpoints another folder."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if in_bucket(self.path):
                mark.write_text("checkpoints of tpukit\n")  # a bucket has no locks
            else:
                lock = WriterLock(Path(mark))
                lock.take(
                    what=f"The checkpoint folder {self.path}",
                    instead="end that run, close() that checkpointer, or give this run another "
                    "folder.",
                )
                self._lock = lock
        except TPUValidationError as error:
            raise TPUCheckpointError(str(error)) from None
        except OSError as error:
            kind = TPUStorageError if steps else TPUCheckpointError  # it was writable before
            raise kind(
                f"Checkpoints cannot be written to {self.path}: {error.strerror or error}. Choose "
                "a folder that this user may write to."
            ) from error
        self._taken = True

    def try_writing(self) -> None:
        """Write and remove a small file, to find out early whether a save can succeed.

        Raises:
            OSError: Nothing can be written here now.
        """
        if in_bucket(self.path):
            return
        trial = self.path / f".{secrets.token_hex(4)}{UNFINISHED}"
        trial.mkdir()
        try:
            (trial / "trial").write_text("a full disk creates files but refuses their content")
        finally:
            remove_folder(trial)

    def release(self) -> None:
        """Release the folder, so that another process may write here."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._taken = False

    def remove(self, steps: Sequence[int]) -> None:
        """Delete the checkpoints of some steps."""
        for step in steps:
            # Records first, so that the rest does not count as complete if this process ends.
            remove_folder(self.folder(step) / record.FOLDER)
            remove_folder(self.folder(step))
            self.damaged.pop(step, None)

    def remove_unfinished(self) -> None:
        """Delete the remains of crashed or failed saves; only the writer may."""
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
