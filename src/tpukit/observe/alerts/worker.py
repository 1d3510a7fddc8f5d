"""Actions in a thread of their own: one that fails or hangs hurts neither training nor monitor."""

import contextlib
import logging
import queue
import subprocess
import threading
import time
from urllib.error import URLError

from .actions import Perform
from .alert import Alert

logger = logging.getLogger(__name__)
MOST_WAITING = 16
END_WAIT_S = 2.0


class ActionWorker:
    """Performs one rule's action, alert after alert.

    Alerts that come while the action is busy wait; when too many do, the newest are dropped and
    the log says so. Each rule has its own worker, so an action that hangs delays no other rule's.
    """

    def __init__(self, name: str, perform: Perform) -> None:
        self._name, self._perform = name, perform
        self._waiting: queue.Queue[Alert | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def submit(self, alert: Alert) -> None:
        """Have the action performed soon; returns at once."""
        if self._thread is None:
            # A daemon: an action that hangs does not keep the program from ending.
            self._thread = threading.Thread(
                target=self._run, name=f"alert {self._name}", daemon=True
            )
            self._thread.start()
        try:
            self._waiting.put_nowait(alert)
        except queue.Full:
            self.dropped += 1
            logger.warning(
                "alert %s: its action is still busy with earlier ones, so this one is dropped "
                "(%d so far): %s",
                self._name,
                self.dropped,
                alert.explanation,
            )

    def close(self, timeout_s: float = END_WAIT_S) -> None:
        """Let the action finish what waits, for a moment; one that hangs is left behind."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (alert := self._waiting.get()) is not None:
            try:
                self._perform(alert)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - anything a user's action may raise
                logger.warning("alert %s: its action failed: %s", self._name, _reason(error))


def _reason(error: BaseException) -> str:
    """Say what went wrong, without a command's arguments or an address: they may hold secrets."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"the command exited with code {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"the command took over {error.timeout:g} s and was killed"
    if isinstance(error, URLError):
        return f"the webhook could not be reached ({error.reason})"
    return f"{type(error).__name__}: {error}"
