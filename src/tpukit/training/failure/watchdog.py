"""A watchdog that ends a training process that makes no progress."""

import contextlib
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO

from ...errors import ConfigError
from ...exit_codes import ExitCode
from ...runtime.files import open_private, unguessable_folder

logger = logging.getLogger(__name__)

POLLS_PER_TIMEOUT = 10
LONGEST_POLL_S = 5.0
# Timeouts by which the interpreter's own timer acts later than this thread.
GRACE = 1.5


class HangWatchdog:
    """Ends the process if `beat()` is not called often enough.

    A worker that hangs in a collective makes all others wait, so it must end: its stack traces are
    written to a file, and the process exits with `ExitCode.HUNG`. If Python itself is blocked (by a
    C extension that holds the interpreter lock), its built-in timer writes the stack traces
    somewhat later and exits with `ExitCode.FAILED`.

    ```python
    with HangWatchdog(600, directory=run_directory) as watchdog:
        for batch in batches:
            step(batch)
            watchdog.beat()
    ```

    Args:
        timeout_s: The longest time between two beats.
        on_hang: Called with the file of stack traces, instead of ending the process.
        directory: Folder of that file; by default a new private folder among the temporary
            files.
        first_timeout_s: The longest time to the first beat, which includes compiling; by
            default `timeout_s`.
        before_exit: Called before the process ends, unless Python itself is blocked.
    """

    def __init__(
        self,
        timeout_s: float,
        on_hang: Callable[[Path], None] | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        first_timeout_s: float | None = None,
        before_exit: Callable[[], None] | None = None,
    ) -> None:
        for name, value in (("timeout_s", timeout_s), ("first_timeout_s", first_timeout_s)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; give a number of seconds above 0.")
        self._timeout_s = timeout_s
        self._on_hang, self._before_exit = on_hang, before_exit
        # Not in the temporary folder itself, where another user could place a link of that name.
        folder = unguessable_folder() if directory is None else Path(directory)
        self._is_own_folder = directory is None
        self._stacks_path = folder / f"hang-{os.getpid()}.txt"
        self._first_timeout_s = timeout_s if first_timeout_s is None else first_timeout_s
        self._allowed_s: float | None = None
        self._beats = 0
        self._last_beat = 0.0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self) -> None:
        """Report that a step was completed."""
        self._last_beat = time.monotonic()
        self._beats += 1

    @contextlib.contextmanager
    def allow(self, timeout_s: float) -> Generator[None]:
        """Set another timeout for the block, such as an evaluation or a compile."""
        before, self._allowed_s = self._allowed_s, timeout_s
        self._last_beat = time.monotonic()
        try:
            yield
        finally:
            self._allowed_s = before
            self._last_beat = time.monotonic()

    def __enter__(self) -> "HangWatchdog":
        self._stacks_path.parent.mkdir(parents=True, exist_ok=True)
        self._last_beat = time.monotonic()
        stacks = open(self._stacks_path, "w", encoding="utf-8", opener=open_private)
        self._arm(stacks, self._limit_s())
        self._thread = threading.Thread(
            target=self._watch, args=(stacks,), name="tpukit-watchdog", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _limit_s(self) -> float:
        if self._allowed_s is not None:
            return self._allowed_s
        return self._timeout_s if self._beats else self._first_timeout_s

    def _arm(self, stacks: IO[str], left_s: float) -> None:
        # Called in the training thread too, which may block Python before the watching thread runs.
        if self._on_hang is None:
            later_s = left_s + GRACE * self._limit_s()
            faulthandler.dump_traceback_later(later_s, exit=True, file=stacks)

    def _watch(self, stacks: IO[str]) -> None:
        try:
            while not self._closed.is_set():
                limit_s = self._limit_s()
                left_s = self._last_beat + limit_s - time.monotonic()
                if left_s < 0:
                    self._report(stacks, limit_s)
                    return
                self._arm(stacks, left_s)
                self._closed.wait(min(LONGEST_POLL_S, limit_s / POLLS_PER_TIMEOUT))
        finally:
            if self._on_hang is None:
                faulthandler.cancel_dump_traceback_later()
            stacks.close()
            if not self._stacks_path.stat().st_size:
                self._stacks_path.unlink()
                if self._is_own_folder:
                    self._stacks_path.parent.rmdir()

    def _report(self, stacks: IO[str], limit_s: float) -> None:
        stacks.write(f"No step was completed for {limit_s:.1f} s; {self._beats} before.\n\n")
        stacks.flush()
        faulthandler.dump_traceback(file=stacks, all_threads=True)
        # After the file, because the hanging thread may hold the lock of a log handler.
        logger.error(
            "No step was completed for %.1f s (%d before); the stacks of all threads are in %s",
            limit_s,
            self._beats,
            self._stacks_path,
        )
        if self._on_hang is None:
            if self._before_exit is not None:
                self._before_exit()
            os._exit(ExitCode.HUNG)
        self._on_hang(self._stacks_path)
