"""Saving and restoring of training states; a crash loses steps but never the run."""

import logging
import os
import shlex
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax

from ...annotations import PyTree
from ...errors import TPUCheckpointError, TPUStorageError
from ...runtime.multihost import smallest_of_all
from ...step.host_memory import READ_AT_ONCE_BYTES
from .agreement import raise_together
from .directory import CheckpointDirectory
from .named_arrays import (
    LeafShape,
    arrays_of,
    describe_tree,
    difference,
    nested,
    shardings_of,
    tree_like,
)
from .orbax_arrays import OrbaxArrays, PinnedMemory
from .record import Record, plain_json
from .restored import Checkpoint, SavedArrays, SavedItem
from .verification import Verification, verify
from .writer import IO_ERRORS, CheckpointWriter, first_line, is_storage_failure

logger = logging.getLogger(__name__)

NO_STEP = -1  # exchanged between processes


class TPUCheckpointer:
    """Checkpoints of one run in a folder or a gs:// bucket.

    ```python
    with TPUCheckpointer("gs://bucket/run1", max_to_keep=3) as checkpointer:
        checkpointer.save(step=1000, params=params, opt_state=opt_state, data=stream.state())
        restored = checkpointer.restore(like={"params": params, "opt_state": opt_state})
    ```

    In a job of several processes every process makes the same calls. A checkpoint counts only
    when all processes have written their part; older ones are deleted only after that.

    Args:
        checkpoint_dir: A folder or a gs:// address, for this run only.
        max_to_keep: How many of the newest to keep; None keeps all.
        async_checkpointing: Whether `save` returns as soon as the arrays are copied from the
            devices, while they are written in the background.
        read_at_once_bytes: How much of a restore may be in host memory at any time; never less than
            the largest array.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        async_checkpointing: bool = True,
        *,
        read_at_once_bytes: int = READ_AT_ONCE_BYTES,
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise TPUCheckpointError(
                f"max_to_keep is {max_to_keep}; keep at least 1, or None for all."
            )
        self._directory = CheckpointDirectory(checkpoint_dir)
        self._async = async_checkpointing
        self._arrays = OrbaxArrays(read_at_once_bytes=read_at_once_bytes)
        self._writer = CheckpointWriter(self._directory, self._arrays, max_to_keep=max_to_keep)
        self._pinned: PinnedMemory | None = None
        self._blocked_s = 0.0

    @property
    def directory(self) -> str:
        """The folder or gs:// address of the checkpoints."""
        return os.fspath(self._directory.path)

    @property
    def blocked_s(self) -> float:
        """Seconds that callers have waited in `save` and `wait` so far (measured)."""
        return self._blocked_s

    def reserve(self) -> None:
        """Become the writer of the folder now, rather than at the first save.

        Raises:
            TPUCheckpointError: Another process writes there, or the folder is not writable.
        """
        problem: TPUCheckpointError | None = None
        if jax.process_index() == 0:
            try:
                self._directory.take()
            except TPUCheckpointError as error:
                problem = error
        raise_together(
            problem,
            elsewhere=f"Process 0 cannot write to {self.directory}; its error has the reason.",
        )

    def prepare(self, **items: PyTree) -> None:
        """Allocate, in the background, memory that the first save would otherwise wait for.

        Args:
            **items: The arrays of that save, or `jax.ShapeDtypeStruct`s with shardings.
        """
        if PinnedMemory.is_wanted():
            self._pinned = PinnedMemory(items)

    def save(
        self,
        step: int,
        *,
        params: PyTree = None,
        opt_state: PyTree = None,
        data: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        **items: PyTree,
    ) -> None:
        """Save pytrees of arrays as the checkpoint of `step`.

        Waits for an earlier save that is still being written, and raises its failure. The arrays
        may be donated or overwritten as soon as `save` returns.

        Args:
            step: The number of steps taken.
            params: The parameters.
            opt_state: The optimizer's state.
            data: Position of this process's data stream, as plain data.
            metadata: Any other plain data to keep.
            **items: More pytrees by name (a random key, a model state).

        Raises:
            TPUCheckpointError: The folder belongs to another run, or the step is already saved.
            TPUStorageError: This save or the one before it could not be written. Earlier
                checkpoints are still good, and the next save may succeed.
        """
        started = time.monotonic()
        self._writer.wait_for_all()
        if self._pinned is not None:
            self._pinned.wait()
        trees = {"params": params, "opt_state": opt_state, **items}
        trees = {name: tree for name, tree in trees.items() if tree is not None}
        record = Record(
            step=_checked_step(step),
            process=jax.process_index(),
            processes=jax.process_count(),
            data=None if data is None else plain_json(data, what="data"),
            metadata=plain_json(metadata or {}, what="metadata"),
            items={name: describe_tree(tree, item=name) for name, tree in trees.items()},
        )
        arrays = {name: arrays_of(tree, item=name) for name, tree in trees.items()}
        self._writer.start(record, arrays)
        if not self._async:
            self._writer.wait_for_all()
        self._blocked_s += time.monotonic() - started

    def wait(self) -> None:
        """Return when the last save is complete.

        Raises:
            TPUStorageError: The save could not be written.
        """
        started = time.monotonic()
        self._writer.wait_for_all()
        self._blocked_s += time.monotonic() - started

    def restore(
        self, step: int | None = None, *, like: Mapping[str, PyTree] | None = None
    ) -> Checkpoint:
        """Read a checkpoint after verifying its files.

        Args:
            step: The checkpoint's step; by default the newest good one. Unfinished or damaged
                checkpoints are skipped, and the log has the reason.
            like: The items to restore, each a pytree of arrays or `jax.ShapeDtypeStruct`s. The
                arrays are restored onto their shardings, on any mesh. Without `like`, every item
                is restored as numpy arrays in dicts and lists.

        Raises:
            TPUCheckpointError: There is no good checkpoint, or it is of another model.
        """
        self._writer.wait_for_all()
        wanted = {name: describe_tree(tree, item=name) for name, tree in (like or {}).items()}
        items = None if like is None else set(like)
        skipped: dict[int, str] = {}
        chosen = self._newest(items, skipped) if step is None else self._checked(step, items)
        records = self._directory.records(chosen)
        saved = records[0].items
        if problem := difference(saved, wanted):
            raise TPUCheckpointError(
                f"The checkpoint of step {chosen} in {self.directory} is of another model: "
                f"{problem}. Use the configuration that saved it, or another checkpoint folder."
            )
        with self._reading(chosen):
            restored = self._read(chosen, saved, like)
        self._writer.continues_run = True
        logger.info("Restored the checkpoint of step %d from %s", chosen, self.directory)
        return Checkpoint(
            step=chosen,
            items=restored,
            metadata=records[0].metadata,
            positions=tuple(record.data for record in records),
            skipped=skipped,
        )

    def open(self, step: int | None = None, *, item: str = "params") -> SavedItem:
        """Find a checkpoint as `restore` does, without reading arrays until they are accessed.

        Args:
            step: The checkpoint's step; by default the newest good one.
            item: Name of the item.

        Raises:
            TPUCheckpointError: There is no good checkpoint, or it has no such item.
        """
        self._writer.wait_for_all()
        chosen = self._newest({item}, {}) if step is None else self._checked(step, {item})
        saved = self._directory.records(chosen)[0].items
        if problem := difference(saved, {item: saved.get(item, [])}):
            raise TPUCheckpointError(f"Step {chosen} in {self.directory}: {problem}.")
        folder = self._directory.folder(chosen)

        def read(shape: LeafShape) -> Any:
            with self._reading(chosen):
                return self._arrays.load(folder, {item: [shape]}, {item: {}})[item][shape.name]

        return SavedItem(chosen, SavedArrays(saved[item], read), tuple(saved))

    def steps(self) -> list[int]:
        """Return the steps with complete checkpoints, oldest first."""
        return self._directory.steps()

    def latest_step(self) -> int | None:
        """Return the newest step with a complete checkpoint, or None."""
        return next(reversed(self.steps()), None)

    def verify(self, step: int) -> Verification:
        """Compare every file of a checkpoint with its record; nothing is changed or raised."""
        return verify(self._directory, _checked_step(step))

    def discard_newer(self, step: int) -> None:
        """Delete the checkpoints after `step`, so that training can go another way from there."""
        self._writer.wait_for_all()
        if jax.process_index() == 0:
            self._directory.take()
            self._directory.remove([newer for newer in self.steps() if newer > step])
        smallest_of_all(0)  # no process saves before they are deleted

    def close(self) -> None:
        """Finish the last save, and let another process write to the folder."""
        try:
            self._writer.wait()  # for this process alone, because the others may have ended
        finally:
            if self._pinned is not None:
                self._pinned.wait()
            self._writer.close()
            self._arrays.close()
            self._directory.release()

    def __enter__(self) -> "TPUCheckpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, step: int, items: set[str] | None) -> int:
        """Return the step if its checkpoint is good; raise otherwise."""
        verified = self._verify_together(_checked_step(step), items)
        if verified.good:
            return step
        raise TPUCheckpointError(
            f"Step {step} in {self.directory} cannot be restored: {verified.problem}. "
            f"{self._complete_steps()}"
        )

    def _newest(self, items: set[str] | None, skipped: dict[int, str]) -> int:
        """Return the newest step with a good checkpoint; add the others to `skipped`."""
        for step in reversed(self._directory.found_steps()):
            if reason := self._directory.unfinished(step):
                skipped[step] = reason
                logger.warning("Skipping the checkpoint of step %d: %s", step, reason)
        before: int | None = None
        while True:
            below = [step for step in self.steps() if before is None or step < before]
            step = smallest_of_all(below[-1] if below else NO_STEP)
            if step == NO_STEP:
                raise TPUCheckpointError(self._no_good_checkpoint(skipped))
            problem = self._verify_together(step, items).problem
            if problem is None:
                return step
            before = step
            self._directory.damaged[step] = skipped[step] = problem
            logger.warning("Skipping the checkpoint of step %d: %s", step, problem)

    def _verify_together(self, step: int, items: set[str] | None) -> Verification:
        share = (jax.process_index(), jax.process_count())
        own = verify(self._directory, step, items=items, share=share, may_raise=True)
        if smallest_of_all(0 if own.problem else 1) == 0 and own.problem is None:
            return replace(own, problem="another process found it damaged; its log has the details")
        return own

    def _read(
        self, step: int, saved: Mapping[str, list[LeafShape]], like: Mapping[str, PyTree] | None
    ) -> dict[str, Any]:
        folder = self._directory.folder(step)
        if like is None:
            arrays = self._arrays.load(folder, saved, {name: {} for name in saved})
            return {name: nested(shapes, arrays[name]) for name, shapes in saved.items()}
        shardings = {name: shardings_of(tree, item=name) for name, tree in like.items()}
        arrays = self._arrays.load(folder, {name: saved[name] for name in like}, shardings)
        return {name: tree_like(tree, arrays[name], item=name) for name, tree in like.items()}

    @contextmanager
    def _reading(self, step: int) -> Generator[None]:
        """Turn errors of the storage into tpukit's errors about this checkpoint."""
        try:
            yield
        except IO_ERRORS as error:
            kind = TPUStorageError if is_storage_failure(error) else TPUCheckpointError
            raise kind(
                f"Step {step} in {self.directory} could not be read: {first_line(error)}. "
                f"{self._complete_steps()}"
            ) from error

    def _no_good_checkpoint(self, skipped: Mapping[int, str]) -> str:
        if not skipped:
            return f"There is no checkpoint in {self.directory}."
        problems = "; ".join(f"step {step}: {reason}" for step, reason in list(skipped.items())[:3])
        folder = self.directory.rstrip("/")
        move = "gcloud storage mv" if "://" in folder else "mv"
        return (
            f"No checkpoint in {folder} is good ({problems}). Put an undamaged copy of one of them "
            "back, or move them away to begin at step 1 again: "
            f"{move} {shlex.quote(folder)} {shlex.quote(f'{folder}.damaged')}"
        )

    def _complete_steps(self) -> str:
        steps = self.steps()
        return (
            f"Complete ones: {', '.join(map(str, steps))}."
            if steps
            else "No checkpoint is complete."
        )


def _checked_step(step: int) -> int:
    if step < 0:
        raise TPUCheckpointError(f"step is {step}; steps count from 0.")
    return step
