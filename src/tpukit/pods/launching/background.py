"""Runs in processes of their own: started, followed and stopped from any terminal."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import TPUValidationError, did_you_mean
from ...runtime.files import private_folder
from ...runtime.interruption import whole_or_not_begun
from ..store import Store
from ..store.locks import is_held
from .launch import LOCK, RUNS, Launch, already_supervised
from .result import GAVE_UP
from .run_log import FILE, POLL_S, RunLogEntry, read_log

MODULE = "tpukit.pods.launching.runner"
PID_FILE = "pid"
ERRORS = "errors.txt"
STARTED_S = 60.0
"""How long a supervisor may take to write its first entry, on a machine that is very busy."""
KEPT_LOGS = 200
"""Of runs that have ended; older ones go when another run begins."""


@dataclass
class BackgroundRun:
    """A run that a process of its own supervises."""

    name: str
    folder: Path
    pid: int | None = None  # where it is a child of this process

    @classmethod
    def start(cls, launch: Launch) -> "BackgroundRun":
        """Start the process that supervises a run; it outlives this one.

        What the job's processes get as variables may be secret: it travels through a pipe.

        Raises:
            ConfigError: Another process supervises it already.
        """
        if is_held(launch.folder / LOCK):
            raise already_supervised(launch.name)
        store = launch.manager.store
        remove_old_logs(store, keep=KEPT_LOGS)
        private_folder(launch.folder)
        (launch.folder / FILE).unlink(missing_ok=True)
        request = {
            "name": launch.name,
            "job": launch.job.to_dict(with_variables=True),
            "variables": dict(launch.environment),
            "provider": launch.manager.settings.provider_name,
            "folder": os.getcwd(),
        }
        run = cls(launch.name, launch.folder)
        asked, asking = os.pipe()
        errors = os.open(launch.folder / ERRORS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with whole_or_not_begun():
                # Not subprocess, whose objects expect to be waited for: this one is to stay.
                run.pid = os.posix_spawn(
                    sys.executable,
                    [sys.executable, "-m", MODULE],
                    {**os.environ, "TPUKIT_STATE_DIR": str(store.folder)},
                    file_actions=[
                        (os.POSIX_SPAWN_DUP2, asked, 0),
                        (os.POSIX_SPAWN_DUP2, errors, 1),
                        (os.POSIX_SPAWN_DUP2, errors, 2),
                    ],
                    setsid=True,
                )
        finally:
            os.close(asked)
            os.close(errors)
        (launch.folder / PID_FILE).write_text(str(run.pid))
        with os.fdopen(asking, "wb") as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write(json.dumps(request).encode())
        return run

    @classmethod
    def find(cls, store: Store, name: str) -> "BackgroundRun":
        """Return a run that was started earlier.

        Raises:
            TPUValidationError: There is none of that name.
        """
        folder = store.folder / RUNS / name
        if not (folder / FILE).exists() or Path(name).name != name:
            known = [one.parent.name for one in (store.folder / RUNS).glob(f"*/{FILE}")]
            raise TPUValidationError(
                f"There is no run {name!r}; {', '.join(sorted(known)) or 'none'} are known."
                + did_you_mean(name, known)
            )
        return cls(name, folder)

    @property
    def is_running(self) -> bool:
        """Whether somebody supervises it."""
        if self.pid is None:
            return is_held(self.folder / LOCK)
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == 0
        except ChildProcessError:  # it has ended, and was waited for
            return False

    def entries(self, *, follow: bool = True) -> Iterator[RunLogEntry]:
        """Yield what happened, and what happens until it ends."""
        last: RunLogEntry | None = None
        for entry in read_log(self.folder, is_running=lambda: self.is_running, follow=follow):
            last = entry
            yield entry
        while follow and self.pid is not None and self.is_running:
            time.sleep(POLL_S)  # it has said all, and closes
        if follow and (last is None or not last.is_final):
            errors = self.folder / ERRORS
            said = errors.read_text(errors="replace").strip() if errors.exists() else ""
            tail = said.splitlines()[-1] if said else "it was killed"
            yield RunLogEntry(
                "error",
                f"the supervisor of {self.name} has ended: {tail}. Launch the job again to go on.",
                data={"code": GAVE_UP},
            )

    def begin(self, wait_s: float) -> RunLogEntry | None:
        """Wait until the run makes a step or ends, and return how it stands.

        Args:
            wait_s: How long to look, from the supervisor's first entry on.

        Returns:
            The last entry about the run as a whole; None where there is none after `STARTED_S`.
        """
        deadline = time.monotonic() + STARTED_S

        def goes_on() -> bool:
            return self.is_running and time.monotonic() < deadline

        last: RunLogEntry | None = None
        for entry in read_log(self.folder, is_running=goes_on, follow=True):
            if last is None:
                deadline = time.monotonic() + wait_s
            last = last if entry.kind == "line" else entry
            if entry.is_final or entry.kind == "step":
                return last
        return last if self.is_running else [*self.entries()][-1]

    def stop(self, wait_s: float, *, is_enough: Callable[[], bool] = lambda: False) -> bool:
        """Let the job save and end, and tell whether it has within `wait_s`.

        Args:
            wait_s: How long to wait for its supervisor to end.
            is_enough: Asked meanwhile whether to wait no longer.
        """
        with contextlib.suppress(ProcessLookupError, ValueError, FileNotFoundError):
            if self.is_running:
                os.kill(int((self.folder / PID_FILE).read_text()), signal.SIGTERM)
        deadline = time.monotonic() + wait_s
        while self.is_running and time.monotonic() < deadline and not is_enough():
            time.sleep(POLL_S)
        return not self.is_running


def remove_old_logs(store: Store, *, keep: int) -> None:
    """Remove the folders of runs that have ended, all but the newest."""
    ended = [
        one
        for one in (store.folder / RUNS).glob("*")
        if (one / FILE).exists() and not is_held(one / LOCK)
    ]
    newest_first = sorted(ended, key=lambda one: (one / FILE).stat().st_mtime, reverse=True)
    for folder in newest_first[keep:]:
        shutil.rmtree(folder, ignore_errors=True)
