"""Barriers of the processes of a save, which pass the failure of one process on to all.

At Orbax's own barriers the other processes wait for the full time-out when one could not write. The
barriers here use the coordination service's key-value store, where a process can report its failure
instead of its arrival. Any thread may use them.
"""

import jax

from ...errors import TPUCheckpointError, TPUError, TPUStorageError
from ...runtime.multihost import coordination_client, smallest_of_all

_GOOD, _REFUSED, _STORAGE = 2, 1, 0
_ARRIVED = "arrived"


def raise_together(
    error: TPUError | None, *, elsewhere: str, refusal: type[TPUError] = TPUCheckpointError
) -> None:
    """Raise on every process if any process has an error; every process must call it.

    Args:
        error: The error of this process.
        elsewhere: The message on processes without an error of their own.
        refusal: The class of that error, unless the storage failed.
    """
    own = _GOOD if error is None else _STORAGE if isinstance(error, TPUStorageError) else _REFUSED
    worst = smallest_of_all(own)
    if error is not None:
        raise error
    if worst != _GOOD:
        raise (TPUStorageError if worst == _STORAGE else refusal)(elsewhere)


class SaveBarriers:
    """The barriers of one save after another."""

    def __init__(self) -> None:
        self._folder = ""
        self._barrier = 0

    def begin(self, number: int) -> None:
        """Begin the barriers of a save.

        Args:
            number: The same on all processes, and not used before in this job.
        """
        if jax.process_count() == 1:
            return
        if self._folder and jax.process_index() == 0:
            coordination_client().key_value_delete(self._folder)
        self._folder, self._barrier = f"tpukit/saves/{number}/", 0

    def wait(self, *, timeout_ms: int, key: str = "") -> None:
        """Return when all processes have arrived.

        Args:
            timeout_ms: How long to wait for the others.
            key: Orbax's name of the barrier; unused, because barriers are counted here.

        Raises:
            TPUStorageError: A process has failed.
            TimeoutError: A process has not arrived in time.
        """
        if jax.process_count() == 1:
            return
        self._report(_ARRIVED)
        folder, self._barrier = f"{self._folder}{self._barrier}", self._barrier + 1
        if jax.process_index() == 0:
            reports = (
                _wait_for(f"{folder}/{process}", timeout_ms)
                for process in range(jax.process_count())
            )
            failures = [report for report in reports if report != _ARRIVED]
            verdict = failures[0] if failures else _ARRIVED
            _set(f"{folder}/verdict", verdict)
        else:
            verdict = _wait_for(f"{folder}/verdict", timeout_ms)
        if verdict != _ARRIVED:
            raise TPUStorageError(verdict)

    def fail(self, reason: str) -> None:
        """Report to the other processes that this one cannot finish the save."""
        if jax.process_count() == 1:
            return
        message = f"process {jax.process_index()} failed: {reason}"
        if jax.process_index() == 0:
            _set(f"{self._folder}{self._barrier}/verdict", message)
        else:
            self._report(message)

    def _report(self, message: str) -> None:
        _set(f"{self._folder}{self._barrier}/{jax.process_index()}", message)


def _set(key: str, value: str) -> None:
    coordination_client().key_value_set(key, value, allow_overwrite=True)


def _wait_for(key: str, timeout_ms: int) -> str:
    try:
        return coordination_client().blocking_key_value_get(key, timeout_ms)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise TimeoutError(f"a process did not arrive within {timeout_ms / 1e3:g} s") from error
