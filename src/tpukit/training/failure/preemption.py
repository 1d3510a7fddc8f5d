"""Stop training at a step all processes agree on when any of them is told to stop."""

import logging
import os
import signal
import threading
from types import FrameType, TracebackType

import jax

from ...errors import TPUDistributedError

logger = logging.getLogger(__name__)
_NOTICE = "\n{name}: stopping after this step, and saving it (Ctrl-C twice stops at once)\n"


class PreemptionGuard:
    """Turns SIGTERM (a spot or maintenance notice) and Ctrl-C into a stop after a whole step.

    ```python
    with PreemptionGuard() as guard:
        for step in range(first, last):
            ...
            if guard.should_stop(step):
                checkpointer.save(step, ...)
                break
    ```

    A second Ctrl-C interrupts at once. In a job of several processes jax spreads the notice: a
    signal to one process stops all of them after the same step. Outside the main thread, where
    Python delivers no signals, nothing is caught.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, object] = {}
        self._seen: signal.Signals | None = None
        self._stopping = False

    @property
    def signal_name(self) -> str | None:
        """The signal this process received, or None."""
        return None if self._seen is None else self._seen.name

    def should_stop(self, step: int) -> bool:
        """Whether to save and stop now; every process must ask after every step.

        Args:
            step: How many steps have been taken, the same number in every process.

        Raises:
            TPUDistributedError: jax's preemption service is switched off.
        """
        if not self._stopping:
            self._stopping = self._agreed(step) if jax.process_count() > 1 else bool(self._seen)
            if self._stopping:
                told = self.signal_name or "some process was told to stop"
                logger.info("Stopping after step %d: %s", step, told)
        return self._stopping

    def __enter__(self) -> "PreemptionGuard":
        if threading.current_thread() is not threading.main_thread():
            logger.warning("Signals are not caught: training does not run in the main thread")
            return self
        # Where several processes run, jax itself listens for SIGTERM, to tell the others.
        caught = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
        for number in caught:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType] - from signal()
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if self._seen is signal.SIGINT and received is signal.SIGINT:
            raise KeyboardInterrupt
        first, self._seen = self._seen is None, received
        if first:
            # Not through a stream or a log, whose locks the interrupted code may hold.
            os.write(2, _NOTICE.format(name=received.name).encode())
        if first and jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # so that jax tells the other processes

    def _agreed(self, step: int) -> bool:
        from jax.experimental import multihost_utils

        try:
            return multihost_utils.reached_preemption_sync_point(step)
        except RuntimeError as error:
            raise TPUDistributedError(
                "Processes cannot agree on a step to stop at, because jax's preemption service is "
                "off; set jax_enable_preemption_service before MultiHostConfig.setup()."
            ) from error
