"""How the processes of a save wait for each other, and how a failure of one reaches all.

Orbax lets processes meet at barriers, at which the others wait for the whole time-out when one of
them could not write. The meetings here go through the coordination service's key-value store, where
a process can report its failure instead of its arrival. Threads may use them at any time.
"""

import jax

from ...errors import TPUCheckpointError, TPUError, TPUStorageError
from ...runtime.multihost import coordination_client, smallest_of_all

_GOOD, _REFUSED, _STORAGE = 2, 1, 0
_ARRIVED = "arrived"


def raise_together(
    error: TPUError | None, *, elsewhere: str, refusal: type[TPUError] = TPUCheckpointError
) -> None:
    """Raise on every process if any process has an error; every process must ask.

    Args:
        error: The error of this process.
        elsewhere: What to report where only another process has one.
        refusal: The error for that report, unless it is a failure of the storage.
    """
    own = _GOOD if error is None else _STORAGE if isinstance(error, TPUStorageError) else _REFUSED
    worst = smallest_of_all(own)
    if error is not None:
        raise error
    if worst != _GOOD:
        raise (TPUStorageError if worst == _STORAGE else refusal)(elsewhere)


class SaveMeetings:
    """The points of one save after another at which all processes must have arrived."""

    def __init__(self) -> None:
        self._folder = ""
        self._meeting = 0

    def begin(self, number: int) -> None:
        """Begin the meetings of a save.

        Args:
            number: The same on all processes, and never used before in this job.
        """
        if jax.process_count() == 1:
            return
        if self._folder and jax.process_index() == 0:
            coordination_client().key_value_delete(self._folder)
        self._folder, self._meeting = f"tpukit/saves/{number}/", 0

    def meet(self, *, timeout_ms: int, key: str = "") -> None:
        """Return when all processes have arrived.

        Args:
            timeout_ms: How long to wait for them.
            key: The name that Orbax has for the meeting; meetings are counted here.

        Raises:
            TPUStorageError: A process has failed.
            TimeoutError: A process has not arrived in time.
        """
        if jax.process_count() == 1:
            return
        self._report(_ARRIVED)
        folder, self._meeting = f"{self._folder}{self._meeting}", self._meeting + 1
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
        """Let no other process wait for this one, which cannot finish the save."""
        if jax.process_count() == 1:
            return
        said = f"process {jax.process_index()} failed: {reason}"
        if jax.process_index() == 0:
            _set(f"{self._folder}{self._meeting}/verdict", said)
        else:
            self._report(said)

    def _report(self, said: str) -> None:
        _set(f"{self._folder}{self._meeting}/{jax.process_index()}", said)


def _set(key: str, value: str) -> None:
    coordination_client().key_value_set(key, value, allow_overwrite=True)


def _wait_for(key: str, timeout_ms: int) -> str:
    try:
        return coordination_client().blocking_key_value_get(key, timeout_ms)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise TimeoutError(f"a process did not arrive within {timeout_ms / 1e3:g} s") from error
