"""Save and restore training states so that a crash at any moment costs steps and never the run."""

import logging
import os
import shlex
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
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
from .orbax_arrays import OrbaxArrays
from .pinned_memory import PinnedMemory
from .record import Record, plain_json
from .result import Checkpoint, Verification
from .saved_arrays import SavedArrays
from .verification import verify
from .writer import IO_ERRORS, CheckpointWriter, first_line, is_storage_failure

logger = logging.getLogger(__name__)

NONE = -1  # what processes say to each other when there is no step


@dataclass(frozen=True)
class SavedItem:
    """One item of the checkpoint of a step, not read yet.

    Attributes:
        step: The step.
        arrays: The item's arrays.
        items: Names of all items of the checkpoint.
    """

    step: int
    arrays: SavedArrays
    items: tuple[str, ...]


class TPUCheckpointer:
    """Checkpoints of one run in a folder or a gs:// bucket.

    ```python
    with TPUCheckpointer("gs://bucket/run1", max_to_keep=3) as checkpointer:
        checkpointer.save(step=1000, params=params, opt_state=opt_state, data=stream.state())
        restored = checkpointer.restore(like={"params": params, "opt_state": opt_state})
    ```

    In a job of several processes every process makes the same calls. A checkpoint counts only
    when all of it is written; older ones are deleted only after that.

    Args:
        checkpoint_dir: A folder or a gs:// address of this run's own.
        max_to_keep: How many of the newest to keep; None keeps all.
        async_checkpointing: Whether `save` returns as soon as the arrays are copied from the
            devices, while they are written in the background.
        read_at_once_bytes: How much of a restore may be in host memory at any time, on its way to
            the devices; at least the largest array is.
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
        """Where the checkpoints are."""
        return os.fspath(self._directory.path)

    @property
    def blocked_s(self) -> float:
        """How long `save` and `wait` have kept the caller waiting so far (measured)."""
        return self._blocked_s

    def reserve(self) -> None:
        """Become the writer of the folder now, rather than at the first save.

        Raises:
            TPUCheckpointError: Another process writes there, or it cannot be written.
        """
        problem: TPUCheckpointError | None = None
        if jax.process_index() == 0:
            try:
                self._directory.take()
            except TPUCheckpointError as error:
                problem = error
        raise_together(
            problem, elsewhere=f"Process 0 cannot write to {self.directory}; its error says why."
        )

    def prepare(self, **items: PyTree) -> None:
        """Make ready, in the background, what the first save of such arrays would wait for.

        Args:
            **items: What `save` will be given, or `jax.ShapeDtypeStruct`s with shardings.
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

        An earlier save that is still being written is waited for first, and its failure is
        raised here. The arrays may be donated or overwritten as soon as this returns.

        Args:
            step: How many steps have been taken.
            params: The parameters.
            opt_state: The optimizer's state.
            data: Where this process's data stream stands, as plain data.
            metadata: Anything else to keep, as plain data.
            **items: More pytrees by name (a random key, a model state).

        Raises:
            TPUCheckpointError: The folder belongs to another run, or the step is already saved.
            TPUStorageError: This save, or the one before it, could not be written. Checkpoints
                that were good before still are, and the next save may succeed.
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
            TPUStorageError: It could not be written.
        """
        started = time.monotonic()
        self._writer.wait_for_all()
        self._blocked_s += time.monotonic() - started

    def restore(
        self, step: int | None = None, *, like: Mapping[str, PyTree] | None = None
    ) -> Checkpoint:
        """Read a checkpoint, after comparing its files with what was written.

        Args:
            step: Which one; by default the newest that is good. Newer ones that are half-written
                or damaged are skipped, and the log says why.
            like: The items to restore, each a pytree of arrays or `jax.ShapeDtypeStruct`s whose
                shardings say where the arrays go: any mesh, any number of devices. Without it,
                every item comes as numpy arrays in dicts and lists.

        Raises:
            TPUCheckpointError: There is no good checkpoint, the step asked for is not good, or
                it is of another model.
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
        """Find a checkpoint as `restore` does, and read each array of an item when it is asked for.

        Args:
            step: Which one; by default the newest that is good.
            item: What of it.

        Raises:
            TPUCheckpointError: There is no good checkpoint, or it holds no such item.
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
        """The steps whose checkpoints are complete, oldest first."""
        return self._directory.steps()

    def latest_step(self) -> int | None:
        """The newest step whose checkpoint is complete, or None."""
        return next(reversed(self.steps()), None)

    def verify(self, step: int) -> Verification:
        """Compare every file of a checkpoint with what was written; change and raise nothing."""
        return verify(self._directory, _checked_step(step))

    def discard_newer(self, step: int) -> None:
        """Delete the checkpoints after `step`: training goes back to it and takes another path."""
        self._writer.wait_for_all()
        if jax.process_index() == 0:
            self._directory.take()
            self._directory.remove([found for found in self.steps() if found > step])
        smallest_of_all(0)  # nobody saves before they are gone

    def close(self) -> None:
        """Finish the last save and let others write to the folder."""
        try:
            self._writer.wait()  # of this process alone: the others may be gone by now
        finally:
            if self._pinned is not None:
                self._pinned.wait()
            self._writer.close()
            self._arrays.close()
            self._directory.release()

    def __enter__(self) -> "TPUCheckpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _checked(self, step: int, items: set[str] | None) -> int:
        """The step, when its checkpoint is good."""
        found = self._verify_together(_checked_step(step), items)
        if found.problem is None:
            return step
        raise TPUCheckpointError(
            f"Step {step} in {self.directory} cannot be restored: {found.problem}. "
            f"{self._which_are_there()}"
        )

    def _newest(self, items: set[str] | None, skipped: dict[int, str]) -> int:
        """The newest step whose checkpoint is good; the others go to `skipped`."""
        for step in reversed(self._directory.found_steps()):
            if reason := self._directory.unfinished(step):
                skipped[step] = reason
                logger.warning("Skipping the checkpoint of step %d: %s", step, reason)
        before: int | None = None
        while True:
            below = [step for step in self.steps() if before is None or step < before]
            step = smallest_of_all(below[-1] if below else NONE)
            if step == NONE:
                raise TPUCheckpointError(self._none_is_good(skipped))
            found = self._verify_together(step, items)
            if found.problem is None:
                return step
            before = step
            self._directory.damaged[step] = skipped[step] = found.problem
            logger.warning("Skipping the checkpoint of step %d: %s", step, found.problem)

    def _verify_together(self, step: int, items: set[str] | None) -> Verification:
        share = (jax.process_index(), jax.process_count())
        own = verify(self._directory, step, items=items, share=share, may_raise=True)
        if smallest_of_all(0 if own.problem else 1) == 0 and own.problem is None:
            return replace(own, problem="another process found it damaged; its log says how")
        return own

    def _read(
        self, step: int, saved: Mapping[str, list[LeafShape]], like: Mapping[str, PyTree] | None
    ) -> dict[str, Any]:
        folder = self._directory.folder(step)
        if like is None:
            found = self._arrays.load(folder, saved, {name: {} for name in saved})
            return {name: nested(shapes, found[name]) for name, shapes in saved.items()}
        shardings = {name: shardings_of(tree, item=name) for name, tree in like.items()}
        found = self._arrays.load(folder, {name: saved[name] for name in like}, shardings)
        return {name: tree_like(tree, found[name], item=name) for name, tree in like.items()}

    @contextmanager
    def _reading(self, step: int) -> Generator[None]:
        """Turn what storage raises into a sentence about this checkpoint."""
        try:
            yield
        except IO_ERRORS as error:
            kind = TPUStorageError if is_storage_failure(error) else TPUCheckpointError
            raise kind(
                f"Step {step} in {self.directory} could not be read: {first_line(error)}. "
                f"{self._which_are_there()}"
            ) from error

    def _none_is_good(self, skipped: Mapping[int, str]) -> str:
        if not skipped:
            return f"There is no checkpoint in {self.directory}."
        found = "; ".join(f"step {step}: {reason}" for step, reason in list(skipped.items())[:3])
        folder = self.directory.rstrip("/")
        move = "gcloud storage mv" if "://" in folder else "mv"
        return (
            f"No checkpoint in {folder} is good ({found}). Put an undamaged copy of one of them "
            "back, or begin at step 1 again after moving them away: "
            f"{move} {shlex.quote(folder)} {shlex.quote(f'{folder}.damaged')}"
        )

    def _which_are_there(self) -> str:
        steps = self.steps()
        return f"Complete ones: {', '.join(map(str, steps))}." if steps else "None is complete."


def _checked_step(step: int) -> int:
    if step < 0:
        raise TPUCheckpointError(f"step is {step}; steps count from 0.")
    return step
