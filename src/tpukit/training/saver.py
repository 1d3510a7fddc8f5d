"""Saves while a run trains: one that fails costs that save, and not the run.

A full disk, a quota or a moment without permission often pass. So training goes on, the next save
is tried as planned, and only a storage that has failed for `patience_s` ends the run, with
`TPUStorageError`. All processes of a run learn of a failure together and decide alike.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import TPUStorageError
from ..records.attempt_recorder import AttemptRecorder
from ..runtime.multihost import said_by_first
from ..runtime.progress import Progress
from ..step.parts import TrainState
from .state_keeper import StateKeeper

LONGEST_PAUSE_S = 5.0
# A preempted host is taken away after about 30 s.
PREEMPTED_PATIENCE_S = 15.0


class Saver:
    """Saves states through a keeper, and counts what failed.

    Args:
        keeper: What saves.
        patience_s: How long saves may fail, from the first failure on.
        progress: Tells the log and the person.
        recorder: Where events go.

    Attributes:
        failed: The steps that were not saved in the end, with the reason.
    """

    def __init__(
        self,
        keeper: StateKeeper,
        *,
        patience_s: float,
        progress: Progress,
        recorder: AttemptRecorder,
    ) -> None:
        self._keeper, self._patience_s = keeper, patience_s
        self._say, self._recorder = progress, recorder
        self._failing_since: float | None = None
        self.failed: dict[int, str] = {}

    def save(
        self, step: int, state: TrainState, *, data: Mapping[str, Any], guard: Mapping[str, Any]
    ) -> None:
        """Begin to save the state after `step`; the write goes on in the background.

        Raises:
            TPUStorageError: Saves have failed for too long.
        """
        self.settle()
        if problem := self._begin(step, state, data, guard):
            self._raise_if_too_long(problem)

    def settle(self) -> None:
        """Wait for the last save, and note it where it failed.

        Raises:
            TPUStorageError: Saves have failed for too long.
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
        """Save the last state of the run, trying again until it is on disk.

        Args:
            step: The last step.
            state: The state after it.
            data: Where the data stream is.
            guard: The loss guard's state.
            is_preempted: Whether the host will be gone soon.
            on_wait: Called before each pause.

        Raises:
            TPUStorageError: Saves have failed for too long.
        """
        began, pause_s = time.monotonic(), 0.5
        self._end()
        while self._keeper.saved_step != step:
            problem = self._begin(step, state, data, guard) or self._end()
            if problem is None:
                return
            self._raise_if_too_long(problem)
            if is_preempted and _is_over(began, PREEMPTED_PATIENCE_S):
                raise problem
            on_wait()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _begin(
        self, step: int, state: TrainState, data: Mapping[str, Any], guard: Mapping[str, Any]
    ) -> TPUStorageError | None:
        try:
            self._keeper.save(step, state, data=data, guard=guard)
        except TPUStorageError as error:
            return self._note(step, error)
        self._recorder.saved(step)
        return None

    def _end(self) -> TPUStorageError | None:
        step = self._keeper.pending_step
        if step is None:
            return None
        try:
            self._keeper.wait()
        except TPUStorageError as error:
            return self._note(step, error)
        self.failed.pop(step, None)
        if self._failing_since is not None:
            self._failing_since = None
            self._say(f"step {step} is saved: the storage works again")
        return None

    def _note(self, step: int, error: TPUStorageError) -> TPUStorageError:
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        first = step not in self.failed
        self.failed[step] = str(error)
        self._recorder.happened(
            "save failed", failed_step=step, good_step=self._keeper.saved_step, error=str(error)
        )
        if first:
            self._say(f"step {step} was not saved, and the next save is tried: {error}")
        return error

    def _raise_if_too_long(self, error: TPUStorageError) -> None:
        assert self._failing_since is not None
        if _is_over(self._failing_since, self._patience_s):
            raise TPUStorageError(
                f"{error} Saves have failed for more than {self._patience_s:g} s "
                "(save_patience_s), so the run ends; start it again to go on from that step."
            ) from error


def _is_over(began: float, allowed_s: float) -> bool:
    """Whether more time has passed, by the clock of process 0."""
    return bool(said_by_first(int(time.monotonic() - began >= allowed_s)))
