"""Writing of checkpoints in the background; a good checkpoint is never lost."""

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
from .orbax_arrays import OrbaxArrays
from .record import FileEntry, Record, digests

logger = logging.getLogger(__name__)

RECORDS_POLL_S = 0.2
RECORDS_TIMEOUT_S = 600.0
# TensorStore's text for an error of the file system: "…: Failed writing: … [os_error_code='28']".
OS_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")
# Errors of Orbax, TensorStore and the file system when a save or a restore fails.
IO_ERRORS = (OSError, ValueError, RuntimeError, TPUCheckpointError)
# Packages that raise errors of a bucket.
_BUCKET_PACKAGES = ("gcsfs", "google", "aiohttp")


class CheckpointWriter:
    """Writes one checkpoint at a time: arrays, then digests and records; then deletes old ones.

    Args:
        directory: The checkpoint folder.
        arrays: Writes the arrays.
        max_to_keep: How many of the newest to keep; None keeps all.
    """

    def __init__(
        self, directory: CheckpointDirectory, arrays: OrbaxArrays, *, max_to_keep: int | None
    ) -> None:
        self._directory = directory
        self._arrays = arrays
        self._max_to_keep = max_to_keep
        self._barriers = arrays.barriers
        self._background = ThreadPoolExecutor(1, thread_name_prefix="tpukit-checkpoint")
        self._saving: tuple[int, Future[None]] | None = None
        # Whether this object wrote or restored a checkpoint here; otherwise they are another run's.
        self.continues_run = False
        _writers_to_finish().add(self)

    def start(self, record: Record, arrays: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy the arrays from the devices and write them in the background.

        Raises:
            TPUStorageError: The storage failed, on this process or another one.
            TPUCheckpointError: The directory or the step must not be written to.
        """
        self._barriers.begin(self._claim(record))
        problem: TPUCheckpointError | None = None
        try:
            self._arrays.start_save(self._directory.folder(record.step), arrays)
        except Exception as error:  # noqa: BLE001  raised again, on all processes
            self._barriers.fail(first_line(error))
            problem = self._failed(record.step, error)
        else:
            self._saving = (record.step, self._background.submit(self._finish, record))
        try:
            raise_together(problem, elsewhere=self._elsewhere(record.step))
        except TPUCheckpointError:
            if problem is None:  # this process's part fails with the others
                with contextlib.suppress(TPUCheckpointError):
                    self.wait()
            raise

    def wait(self) -> None:
        """Return when this process's part of the save is complete; raise if it failed."""
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
        """Return when the save is complete; raise on all processes if it failed on any."""
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
        """Prepare the directory for this step, or raise on every process.

        Returns:
            A number of this save, the same on every process.
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
        good = self._directory.good_steps()
        if good and not self.continues_run:
            raise TPUCheckpointError(
                f"{self._directory.path} contains checkpoints of another run, up to step "
                f"{good[-1]}; restore() one to continue that run, or give this run another folder."
            )
        if step in good:
            raise TPUCheckpointError(
                f"Step {step} is already saved in {self._directory.path}, and a good checkpoint "
                f"is not overwritten; call discard_newer({step - 1}) to delete it first."
            )

    def _finish(self, record: Record) -> None:
        try:
            self._arrays.wait()
            folder = self._directory.folder(record.step)
            sizes = self._directory.sizes(record.step)
            share = list(sizes)[record.process :: record.processes]
            values = digests(folder, share)
            files = {name: FileEntry(sizes[name], values[name]) for name in share}
            replace(record, files=files).write(folder)
            self._barriers.wait(timeout_ms=int(RECORDS_TIMEOUT_S * 1000))
        except BaseException as error:
            self._barriers.fail(first_line(error))
            raise
        if record.process == 0:
            self._await_records(record.step)
            self._remove_old()

    def _await_records(self, step: int) -> None:
        # All records are written, but storage that hosts share may show them a little later.
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
        except OSError as error:  # the new checkpoint is good; the next save tries again
            logger.warning("Older checkpoints could not be deleted: %s", error)

    def _failed(self, step: int, error: Exception) -> TPUCheckpointError:
        if jax.process_index() == 0:
            # To free a full disk. If Orbax is still writing, the next save removes the rest.
            with contextlib.suppress(OSError):
                self._directory.remove_unfinished()
        kind = TPUStorageError if is_storage_failure(error) else TPUCheckpointError
        failure = kind(
            f"The checkpoint of step {step} could not be written to {self._directory.path}: "
            f"{first_line(error)}. {self._left()}; free space or fix the storage, and save again."
        )
        failure.__cause__ = error
        return failure

    def _elsewhere(self, step: int) -> str:
        return (
            f"The checkpoint of step {step} could not be written to {self._directory.path} by "
            f"another process; its log has the reason. {self._left()}."
        )

    def _left(self) -> str:
        try:
            good = self._directory.good_steps()
        except (OSError, TPUCheckpointError):
            return "Which steps are good cannot be read now"
        return f"Step {good[-1]} is still good" if good else "There is no checkpoint yet"


def is_storage_failure(error: BaseException) -> bool:
    """Return whether the storage failed and not the caller, so that a retry may succeed."""
    text = str(error)
    return (
        isinstance(error, OSError | TPUStorageError)
        or OS_ERROR_CODE.search(text) is not None
        or "tensorstore" in text.lower()
        or type(error).__module__.partition(".")[0] in _BUCKET_PACKAGES
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error, without the pages that TensorStore adds."""
    if code := OS_ERROR_CODE.search(str(error)):
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@functools.cache
def _writers_to_finish() -> "weakref.WeakSet[CheckpointWriter]":
    """Return the writers whose saves must finish before the interpreter ends, even without close().

    `atexit` would be too late: by then the executors that Orbax writes with are shut down, and the
    save would be lost. Python has no public hook before that.
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
