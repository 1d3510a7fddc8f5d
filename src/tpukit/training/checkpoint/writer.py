"""Write checkpoints, in the background, so that one that was good before never is lost."""

import contextlib
import functools
import logging
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax

from ...errors import TPUCheckpointError, TPUStorageError
from ...runtime.multihost import said_by_first
from .agreement import raise_together
from .directory import CheckpointDirectory
from .files import digests
from .orbax_arrays import OrbaxArrays
from .record import FileEntry, Record

logger = logging.getLogger(__name__)

RECORDS_POLL_S = 0.2
RECORDS_TIMEOUT_S = 600.0
# How TensorStore quotes the file system: "…: Failed writing: … [os_error_code='28']".
OS_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")
# What Orbax, TensorStore and the file system raise when a save or a restore fails.
IO_ERRORS = (OSError, ValueError, RuntimeError, TPUCheckpointError)
# Packages whose own errors speak of a bucket.
_REMOTE = ("gcsfs", "google", "aiohttp")


class CheckpointWriter:
    """One save at a time: arrays, then digests and records, and only then old ones deleted.

    Args:
        directory: Where the checkpoints go.
        arrays: What writes the arrays.
        max_to_keep: How many of the newest to keep; None keeps all.
    """

    def __init__(
        self, directory: CheckpointDirectory, arrays: OrbaxArrays, *, max_to_keep: int | None
    ) -> None:
        self._directory = directory
        self._arrays = arrays
        self._max_to_keep = max_to_keep
        self._meetings = arrays.meetings
        self._background = ThreadPoolExecutor(1, thread_name_prefix="tpukit-checkpoint")
        self._saving: tuple[int, Future[None]] | None = None
        # Whether this object wrote or restored what is in the directory: only then is it ours.
        self.continues_run = False
        _writers_to_finish().add(self)

    def start(self, record: Record, arrays: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy the arrays from the devices and write them in the background.

        Raises:
            TPUStorageError: The storage failed, on this process or another one.
            TPUCheckpointError: The directory or the step must not be written to.
        """
        self._meetings.begin(self._claim(record))
        problem: TPUCheckpointError | None = None
        try:
            self._arrays.start_save(self._directory.folder(record.step), arrays)
        except Exception as error:  # noqa: BLE001  raised again, on all processes
            self._meetings.fail(first_line(error))
            problem = self._failed(record.step, error)
        else:
            self._saving = (record.step, self._background.submit(self._finish, record))
        try:
            raise_together(problem, elsewhere=self._elsewhere(record.step))
        except TPUCheckpointError:
            if problem is None:  # what this process has begun fails too, because it is not alone
                with contextlib.suppress(TPUCheckpointError):
                    self.wait()
            raise

    def wait(self) -> None:
        """Return when this process's part of the save is complete, or raise why it failed."""
        if self._saving is None:
            return
        step, future = self._saving
        try:
            future.result()
        except Exception as error:
            raise self._failed(step, error) from error
        finally:
            self._saving = None

    def wait_for_all(self) -> None:
        """Return when the save is complete, or raise on all processes why it failed on any."""
        if self._saving is None:
            return
        step, problem = self._saving[0], None
        try:
            self.wait()
        except TPUCheckpointError as error:
            problem = error
        raise_together(problem, elsewhere=self._elsewhere(step))

    def close(self) -> None:
        """End the background thread."""
        self._background.shutdown()

    def _claim(self, record: Record) -> int:
        """Make the directory ready for this step, or refuse on every process.

        Returns:
            A number that no other save of the job has, the same on every process.
        """
        problem: TPUCheckpointError | None = None
        if record.process == 0:
            try:
                self._directory.take()
                self._refuse_other_run(record.step)
                if record.step in self._directory.damaged:
                    self._directory.remove([record.step])
                self._directory.remove_unfinished()
                self._directory.try_writing()
            except OSError as error:
                problem = self._failed(record.step, error)
            except TPUCheckpointError as error:
                problem = error
        raise_together(
            problem,
            elsewhere=f"Process 0 refused to save step {record.step} to {self._directory.path}; "
            "its error says why.",
        )
        self.continues_run = True
        return said_by_first(secrets.randbits(31))

    def _refuse_other_run(self, step: int) -> None:
        found = self._directory.good_steps()
        if found and not self.continues_run:
            raise TPUCheckpointError(
                f"{self._directory.path} holds checkpoints of another run, up to step "
                f"{found[-1]}; restore() one to continue that run, or give this one a folder of "
                "its own."
            )
        if step in found:
            raise TPUCheckpointError(
                f"Step {step} is already saved in {self._directory.path}, and a good checkpoint "
                f"is not overwritten; discard_newer({step - 1}) deletes it first."
            )

    def _finish(self, record: Record) -> None:
        try:
            self._arrays.wait()
            folder = self._directory.folder(record.step)
            sizes = self._directory.sizes(record.step)
            share = list(sizes)[record.process :: record.processes]
            found = digests(folder, share)
            files = {name: FileEntry(sizes[name], found[name]) for name in share}
            replace(record, files=files).write(folder)
            self._meetings.meet(timeout_ms=int(RECORDS_TIMEOUT_S * 1000))
        except BaseException as error:
            self._meetings.fail(first_line(error))
            raise
        if record.process == 0:
            self._await_records(record.step)
            self._remove_old()

    def _await_records(self, step: int) -> None:
        # All are written; storage that several hosts share may show them a little later.
        deadline = time.monotonic() + RECORDS_TIMEOUT_S
        while reason := self._directory.unfinished(step):
            if time.monotonic() > deadline:
                raise TPUStorageError(f"after {RECORDS_TIMEOUT_S:g} s, {reason}")
            time.sleep(RECORDS_POLL_S)

    def _remove_old(self) -> None:
        if self._max_to_keep is None:
            return
        try:
            self._directory.remove(self._directory.good_steps()[: -self._max_to_keep])
        except OSError as error:  # the new one is good; the next save tries again
            logger.warning("Older checkpoints could not be deleted: %s", error)

    def _failed(self, step: int, error: Exception) -> TPUCheckpointError:
        if jax.process_index() == 0:
            # Room for the next one on a full disk. Orbax may still be writing: then the next
            # save removes it.
            with contextlib.suppress(OSError):
                self._directory.remove_unfinished()
        kind = TPUStorageError if is_storage_failure(error) else TPUCheckpointError
        found = kind(
            f"The checkpoint of step {step} could not be written to {self._directory.path}: "
            f"{first_line(error)}. {self._left()}; free space or mend the storage, and save again."
        )
        found.__cause__ = error
        return found

    def _elsewhere(self, step: int) -> str:
        return (
            f"The checkpoint of step {step} could not be written to {self._directory.path} by "
            f"another process, and its log says why. {self._left()}."
        )

    def _left(self) -> str:
        try:
            found = self._directory.good_steps()
        except (OSError, TPUCheckpointError):
            return "Which steps are good cannot be read now"
        return f"Step {found[-1]} is still good" if found else "No checkpoint is there yet"


def is_storage_failure(error: BaseException) -> bool:
    """Whether the storage failed, and not the caller: then the same may succeed later."""
    said = str(error)
    return (
        isinstance(error, OSError | TPUStorageError)
        or OS_ERROR_CODE.search(said) is not None
        or "tensorstore" in said.lower()
        or type(error).__module__.partition(".")[0] in _REMOTE
    )


def first_line(error: BaseException) -> str:
    """What an error says, without the pages TensorStore adds to it."""
    if code := OS_ERROR_CODE.search(str(error)):
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@functools.cache
def _writers_to_finish() -> "weakref.WeakSet[CheckpointWriter]":
    """Writers whose saves are finished before the interpreter ends, also without close().

    Not by atexit: its functions run when the executors that Orbax writes with are already shut,
    and the save would be lost. There is no public way to be called before that.
    """
    writers: weakref.WeakSet[CheckpointWriter] = weakref.WeakSet()

    def finish() -> None:
        for writer in list(writers):
            try:
                writer.wait()
            except TPUCheckpointError as error:
                logger.error("The last save was lost: %s", error)

    threading._register_atexit(finish)  # pyright: ignore
    return writers
