"""A stop by signal, after a step that all processes agree on."""

import contextlib
import logging
import math
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax

from ...errors import TPUDistributedError
from ...runtime.interruption import PATIENCE_S, ctrl_c_ends_process, ending_well

logger = logging.getLogger(__name__)
_NOTICE = "\n{name}: stopping after this step, and saving it (Ctrl-C twice stops at once)\n"
_HURRIED = "\nCtrl-C: ending within 2 s, this step saved if that is done by then (SIGTERM waits)\n"
_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class PreemptionGuard:
    """Turns SIGTERM (a spot or maintenance notice) and Ctrl-C into a stop after a full step.

    ```python
    with PreemptionGuard() as guard:
        for step in range(first, last):
            ...
            if guard.should_stop(step):
                checkpointer.save(step, ...)
                break
    ```

    A second Ctrl-C interrupts at once. A command (`tpukit train`) ends 2 s after the first, even
    if the step is not saved by then, because a person waits at the terminal. In a job of several
    processes jax passes the notice on: a signal to one process stops all of them after the same
    step. Outside the main thread, where Python delivers no signals, none is caught.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, _Handler] = {}
        self._patience = contextlib.ExitStack()
        self._seen: signal.Signals | None = None
        self._stopping = False

    @property
    def signal_name(self) -> str | None:
        """The signal this process received, or None."""
        return None if self._seen is None else self._seen.name

    def should_stop(self, step: int) -> bool:
        """Return whether to save and stop now; every process must call it after every step.

        Args:
            step: How many steps have been taken, the same number in every process.

        Raises:
            TPUDistributedError: jax's preemption service is switched off.
        """
        if not self._stopping:
            self._stopping = self._agreed(step) if jax.process_count() > 1 else bool(self._seen)
            if self._stopping:
                reason = self.signal_name or "another process received a signal"
                logger.info("Stopping after step %d: %s", step, reason)
        return self._stopping

    def __enter__(self) -> "PreemptionGuard":
        if threading.current_thread() is not threading.main_thread():
            logger.warning("Signals are not caught: training does not run in the main thread")
            return self
        # In a job of several processes jax itself listens for SIGTERM, to notify the others.
        caught = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
        for number in caught:
            self._before[number] = signal.signal(number, self._on_signal)
        # Several processes get the time they need to agree on a step.
        patience_s = PATIENCE_S if jax.process_count() == 1 else math.inf
        self._patience.enter_context(ending_well(patience_s))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self._patience.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if self._seen is signal.SIGINT and received is signal.SIGINT:
            before = self._before[signal.SIGINT]
            (before if callable(before) else signal.default_int_handler)(number, frame)
        first, self._seen = self._seen is None, received
        if first:
            # Not through a stream or a logger, because the interrupted code may hold their locks.
            os.write(2, self._notice(received).encode())
        if first and jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # so that jax notifies the other processes

    def _notice(self, received: signal.Signals) -> str:
        is_single = jax.process_count() == 1
        if received is signal.SIGINT and is_single and ctrl_c_ends_process():
            return _HURRIED
        return _NOTICE.format(name=received.name)

    def _agreed(self, step: int) -> bool:
        from jax.experimental import multihost_utils

        try:
            return multihost_utils.reached_preemption_sync_point(step)
        except RuntimeError as error:
            raise TPUDistributedError(
                "The processes cannot agree on a step to stop at, because jax's preemption service "
                "is off; set jax_enable_preemption_service before MultiHostConfig.setup()."
            ) from error
