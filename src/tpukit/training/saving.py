"""How a run saves its training state, and after which steps.

A failed save costs that save and not the run, because a full disk, a quota or a missing permission
often passes. Training goes on and the next save is tried as planned. Only a storage that fails for
`patience_s` ends the run, with `TPUStorageError`. All processes of a run learn of a failure
together, so they decide alike.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..errors import TPUStorageError
from ..records.attempts import AttemptRecorder
from ..runtime.multihost import said_by_first
from ..runtime.progress import Progress
from ..step.parts import TrainState
from ..step.workload import Workload
from .checkpoint import TPUCheckpointer

LONGEST_PAUSE_S = 5.0
# A preempted host disappears after about 30 s.
PREEMPTED_PATIENCE_S = 15.0
TIMED_AFTER = 3  # steps: the first ones are too slow to predict the rest
RECENT = 20  # steps that the time per step is averaged over


class SaveTimes:
    """Decides after which steps to save; all processes of a run get the same answer.

    Clocks of processes differ, and all must save after the same step. So seconds are converted to
    steps at each checkpoint, by the duration of recent steps on process 0.

    Args:
        every: Steps between two checkpoints; 0 is never.
        seconds: Seconds between two checkpoints, instead of steps.
        first: The step that the run begins after.
    """

    def __init__(self, every: int, seconds: float | None, *, first: int) -> None:
        self._every, self._seconds = every, seconds
        self._next = first + TIMED_AFTER
        self._is_timed = False

    def is_due(self, step: int, step_times_s: dict[int, float]) -> bool:
        """Return whether to save after this step; every process must call it after every step."""
        if not self._every or self._seconds is None:
            return bool(self._every) and step % self._every == 0
        if step < self._next:
            return False
        due, self._is_timed = self._is_timed, True
        recent = list(islice(reversed(step_times_s.values()), RECENT))
        step_s = statistics.fmean(recent) if recent else self._seconds
        self._next = step + said_by_first(max(1, round(self._seconds / max(step_s, 1e-6))))
        return due


@dataclass(frozen=True, kw_only=True)
class RestoredState:
    """A saved training state, with the positions of the data stream and the loss guard."""

    state: TrainState
    step: int
    data: dict[str, Any] | None
    guard: dict[str, Any] | None


class StateSaver:
    """Saves a workload's state on a mesh, restores it onto that mesh, and counts failed saves.

    A checkpoint contains no random numbers: those of a step follow from the seed and the step.

    Args:
        work: The workload that is trained.
        mesh: The mesh that its state is on.
        checkpointer: Writes and reads the checkpoints.
        patience_s: How long saves may fail, counted from the first failure.
        progress: Called with each message for the log and the terminal.
        recorder: Records the saves as events.

    Attributes:
        saved_step: The newest step that is known to be on disk.
        failed: The steps that were not saved in the end, with the reason.
    """

    def __init__(
        self,
        work: Workload,
        mesh: Mesh,
        checkpointer: TPUCheckpointer,
        *,
        patience_s: float,
        progress: Progress,
        recorder: AttemptRecorder,
    ) -> None:
        self._work, self._mesh, self._checkpointer = work, mesh, checkpointer
        self._patience_s, self._progress, self._recorder = patience_s, progress, recorder
        self._failing_since: float | None = None
        self._pending_step: int | None = None
        self.saved_step: int | None = None
        self.failed: dict[int, str] = {}

    @property
    def newest_path(self) -> str | None:
        """The newest checkpoint, or None when none was saved."""
        if self.saved_step is None:
            return None
        return f"{self._checkpointer.directory.rstrip('/')}/{self.saved_step}"

    def prepare(self) -> None:
        """Allocate, while the step compiles, what the first save would otherwise wait for."""
        shapes, _ = self._work.abstract_args(self._mesh)
        self._checkpointer.prepare(**_items(shapes))

    def restore(self) -> RestoredState | None:
        """Return the newest good checkpoint with each leaf on its devices; None without one.

        Raises:
            TPUCheckpointError: It is of another model, or every checkpoint is damaged.
            TPUStorageError: It cannot be read now.
        """
        self.wait()
        if self._checkpointer.latest_step() is None:
            return None
        shapes, _ = self._work.abstract_args(self._mesh)
        saved = self._checkpointer.restore(like=_items(shapes))
        self.saved_step = saved.step
        return RestoredState(
            state=TrainState(
                step=jax.device_put(jnp.asarray(saved.step, jnp.int32), shapes.step.sharding),
                params=saved.params,
                opt_state=saved.items.get("opt_state", shapes.opt_state),
                model_state=saved.items.get("model_state", shapes.model_state),
            ),
            step=saved.step,
            data=saved.data,
            guard=saved.metadata.get("guard"),
        )

    def save(
        self, step: int, state: TrainState, *, data: Mapping[str, Any], guard: Mapping[str, Any]
    ) -> None:
        """Begin to save the state after `step`; the write goes on in the background.

        Raises:
            TPUStorageError: Saves have failed for longer than `patience_s`.
        """
        self.settle()
        if problem := self._begin(step, state, data, guard):
            self._raise_if_too_long(problem)

    def settle(self) -> None:
        """Wait for the last save, and record it as failed if it failed.

        Raises:
            TPUStorageError: Saves have failed for longer than `patience_s`.
        """
        if problem := self._end():
            self._raise_if_too_long(problem)

    def finish(
        self,
        step: int,
        state: TrainState,
        *,
        data: Mapping[str, Any],
        guard: Mapping[str, Any],
        is_preempted: bool,
        on_wait: Callable[[], None],
    ) -> None:
        """Save the run's last state, and try again until it is on disk.

        Args:
            step: The last step.
            state: The state after it.
            data: Position of the data stream.
            guard: State of the loss guard.
            is_preempted: Whether the host will disappear soon.
            on_wait: Called before each pause.

        Raises:
            TPUStorageError: Saves have failed for longer than `patience_s`.
        """
        began, pause_s = time.monotonic(), 0.5
        self._end()
        while self.saved_step != step:
            problem = self._begin(step, state, data, guard) or self._end()
            if problem is None:
                return
            self._raise_if_too_long(problem)
            if is_preempted and _is_over(began, PREEMPTED_PATIENCE_S):
                raise problem
            on_wait()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def wait(self) -> None:
        """Return when the last save is on disk.

        Raises:
            TPUStorageError: It could not be written.
        """
        pending, self._pending_step = self._pending_step, None
        self._checkpointer.wait()
        if pending is not None:
            self.saved_step = pending

    def close(self) -> None:
        """Finish the last save and release the folder.

        A lost save is reported and not raised, because it must not hide the error that ends a run.
        """
        try:
            self._checkpointer.close()
        except TPUStorageError as error:
            self._progress(str(error))

    def _begin(
        self, step: int, state: TrainState, data: Mapping[str, Any], guard: Mapping[str, Any]
    ) -> TPUStorageError | None:
        try:
            self._checkpointer.save(
                step,
                **_items(state),
                data=data,
                metadata={"guard": dict(guard), "seed": self._work.seed},
            )
        except TPUStorageError as error:
            return self._record_failure(step, error)
        self._pending_step = step
        self._recorder.saved(step)
        return None

    def _end(self) -> TPUStorageError | None:
        step = self._pending_step
        if step is None:
            return None
        try:
            self.wait()
        except TPUStorageError as error:
            return self._record_failure(step, error)
        self.failed.pop(step, None)
        if self._failing_since is not None:
            self._failing_since = None
            self._progress(f"step {step} is saved: the storage works again")
        return None

    def _record_failure(self, step: int, error: TPUStorageError) -> TPUStorageError:
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        is_first = step not in self.failed
        self.failed[step] = str(error)
        self._recorder.happened(
            "save failed", failed_step=step, good_step=self.saved_step, error=str(error)
        )
        if is_first:
            self._progress(f"step {step} was not saved, and the next save is tried: {error}")
        return error

    def _raise_if_too_long(self, error: TPUStorageError) -> None:
        assert self._failing_since is not None
        if _is_over(self._failing_since, self._patience_s):
            raise TPUStorageError(
                f"{error} Saves have failed for more than {self._patience_s:g} s "
                "(save_patience_s), so the run ends; start it again to go on from that step."
            ) from error


def _is_over(began: float, allowed_s: float) -> bool:
    """Return whether `allowed_s` have passed by the clock of process 0."""
    return bool(said_by_first(int(time.monotonic() - began >= allowed_s)))


def _items(state: TrainState) -> dict[str, Any]:
    """Return the trees that a checkpoint contains; trees without leaves are left out."""
    items = {"params": state.params, "opt_state": state.opt_state, "model_state": state.model_state}
    return {name: tree for name, tree in items.items() if jax.tree.leaves(tree)}
