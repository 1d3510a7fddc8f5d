"""Write checkpoints, in the background, so that one that was good before never is lost."""

import contextlib
import functools
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax

from ...errors import TPUCheckpointError
from ...runtime.multihost import smallest_of_all
from .directory import CheckpointDirectory
from .files import digests
from .orbax_arrays import OrbaxArrays
from .record import FileEntry, Record

logger = logging.getLogger(__name__)

RECORDS_POLL_S = 0.2
RECORDS_TIMEOUT_S = 600.0
# How TensorStore quotes the file system: "…: Failed writing: … [os_error_code='28']".
OS_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")
# What Orbax, TensorStore and the file system raise when storage fails.
STORAGE_ERRORS = (OSError, ValueError, RuntimeError, TPUCheckpointError)


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
        self._background = ThreadPoolExecutor(1, thread_name_prefix="tpukit-checkpoint")
        self._saving: tuple[int, Future[None]] | None = None
        # Whether this object wrote or restored what is in the directory: only then is it ours.
        self.continues_run = False
        _writers_to_finish().add(self)

    def start(self, record: Record, arrays: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy the arrays from the devices and write them in the background.

        Raises:
            TPUCheckpointError: The directory or the step must not be written to.
        """
        self._claim(record)
        try:
            self._arrays.start_save(self._directory.folder(record.step), arrays)
        except STORAGE_ERRORS as error:
            raise self._failed(record.step, error) from error
        self._saving = (record.step, self._background.submit(self._finish, record))

    def wait(self) -> None:
        """Return when the save is complete, or raise why it failed."""
        if self._saving is None:
            return
        step, future = self._saving
        self._saving = None
        try:
            future.result()
        except STORAGE_ERRORS as error:
            raise self._failed(step, error) from error

    def close(self) -> None:
        """End the background thread."""
        self._background.shutdown()

    def _claim(self, record: Record) -> None:
        """Make the directory ready for this step, or refuse on every process."""
        refusal: TPUCheckpointError | None = None
        if record.process == 0:
            try:
                self._directory.take()
                self._refuse_other_run(record.step)
                if record.step in self._directory.damaged:
                    self._directory.remove([record.step])
                self._directory.remove_unfinished()
            except TPUCheckpointError as error:
                refusal = error
        if smallest_of_all(0 if refusal else 1) == 0:
            raise refusal or TPUCheckpointError(
                f"Process 0 refused to save step {record.step} to {self._directory.path}; its "
                "error says why."
            )
        self.continues_run = True

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
        self._arrays.wait()
        folder = self._directory.folder(record.step)
        sizes = self._directory.sizes(record.step)
        share = list(sizes)[record.process :: record.processes]
        found = digests(folder, share)
        files = {name: FileEntry(sizes[name], found[name]) for name in share}
        replace(record, files=files).write(folder)
        if record.process == 0:
            self._await_records(record.step)
            self._remove_old()

    def _await_records(self, step: int) -> None:
        # By looking, not by a barrier: this thread must not meet the other processes out of turn.
        deadline = time.monotonic() + RECORDS_TIMEOUT_S
        while reason := self._directory.unfinished(step):
            if time.monotonic() > deadline:
                raise TPUCheckpointError(f"after {RECORDS_TIMEOUT_S:g} s, {reason}")
            time.sleep(RECORDS_POLL_S)

    def _remove_old(self) -> None:
        if self._max_to_keep is not None:
            self._directory.remove(self._directory.good_steps()[: -self._max_to_keep])

    def _failed(self, step: int, error: Exception) -> TPUCheckpointError:
        if jax.process_index() == 0:
            # Room for the next one on a full disk. Orbax may still be writing: then the next
            # save removes it.
            with contextlib.suppress(OSError):
                self._directory.remove_unfinished()
        found = self._directory.good_steps()
        left = f"Step {found[-1]} is still good" if found else "No checkpoint is there yet"
        return TPUCheckpointError(
            f"The checkpoint of step {step} could not be written to {self._directory.path}: "
            f"{first_line(error)}. {left}; free space or mend the storage, and save again."
        )


def first_line(error: Exception) -> str:
    """What an error says, without the pages TensorStore adds to it."""
    if code := OS_ERROR_CODE.search(str(error)):
        return os.strerror(int(code[1]))
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
            except TPUCheckpointError:
                logger.exception("The last save was lost")

    threading._register_atexit(finish)  # pyright: ignore
    return writers
