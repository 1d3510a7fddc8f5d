"""Runs in background processes, which can be followed and stopped from any terminal."""

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
from ...exit_codes import ExitCode
from ...runtime.files import private_folder
from ...runtime.interruption import whole_or_not_begun
from ..store import Store
from ..store.locks import is_held
from .launch import LOCK, RUNS, Launch, already_supervised
from .run_log import FILE, POLL_S, RunLogEntry, read_log

MODULE = "tpukit.pods.launching.runner"
STOP_SIGNAL = signal.SIGUSR1
"""Tells a supervisor that the job is to save and end."""
PID_FILE = "pid"
ERRORS = "errors.txt"
STARTED_S = 60.0
"""Time limit for a supervisor's first log entry, long enough for a very busy machine."""
KEPT_LOGS = 200
"""Number of logs to keep of runs that have ended."""


@dataclass
class BackgroundRun:
    """A run with a supervisor process of its own."""

    name: str
    folder: Path
    pid: int | None = None  # set if the supervisor is a child of this process

    @classmethod
    def start(cls, launch: Launch) -> "BackgroundRun":
        """Start a supervisor process for a run; it outlives this process.

        The job's environment variables may be secret, so they go through a pipe.

        Raises:
            ConfigError: Another process already supervises the run.
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
        reader, writer = os.pipe()
        errors = os.open(launch.folder / ERRORS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with whole_or_not_begun():
                # subprocess objects expect to be waited for, but this process stays.
                run.pid = os.posix_spawn(
                    sys.executable,
                    [sys.executable, "-m", MODULE],
                    {**os.environ, "TPUKIT_STATE_DIR": str(store.folder)},
                    file_actions=[
                        (os.POSIX_SPAWN_DUP2, reader, 0),
                        (os.POSIX_SPAWN_DUP2, errors, 1),
                        (os.POSIX_SPAWN_DUP2, errors, 2),
                    ],
                    setsid=True,
                )
        finally:
            os.close(reader)
            os.close(errors)
        (launch.folder / PID_FILE).write_text(str(run.pid))
        with os.fdopen(writer, "wb") as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write(json.dumps(request).encode())
        return run

    @classmethod
    def find(cls, store: Store, name: str) -> "BackgroundRun":
        """Return a run that was started earlier.

        Raises:
            TPUValidationError: No run has that name.
        """
        folder = store.folder / RUNS / name
        if not (folder / FILE).exists() or Path(name).name != name:
            known = [path.parent.name for path in (store.folder / RUNS).glob(f"*/{FILE}")]
            raise TPUValidationError(
                f"There is no run {name!r}; {', '.join(sorted(known)) or 'none'} are known."
                + did_you_mean(name, known)
                + f" A job that another machine launched on GKE: tpukit pods attach {name}."
            )
        return cls(name, folder)

    @property
    def is_running(self) -> bool:
        """Whether a supervisor runs."""
        if self.pid is None:
            return is_held(self.folder / LOCK)
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == 0
        except ChildProcessError:  # it has ended and was waited for
            return False

    def entries(self, *, follow: bool = True) -> Iterator[RunLogEntry]:
        """Yield log entries, first the existing ones and then new ones until the run ends."""
        last: RunLogEntry | None = None
        for entry in read_log(self.folder, is_running=lambda: self.is_running, follow=follow):
            last = entry
            yield entry
        while follow and self.pid is not None and self.is_running:
            time.sleep(POLL_S)  # the last entry is written, and the process ends soon
        if follow and (last is None or not last.is_final):
            errors = self.folder / ERRORS
            text = errors.read_text(errors="replace").strip() if errors.exists() else ""
            tail = text.splitlines()[-1] if text else "it was killed"
            yield RunLogEntry(
                "error",
                f"the supervisor of {self.name} has ended: {tail}. Launch the job again to "
                "continue.",
                data={"code": int(ExitCode.GAVE_UP)},
            )

    def begin(self, wait_s: float) -> RunLogEntry | None:
        """Wait until the run makes a step or ends, and return its newest entry.

        Args:
            wait_s: How long to wait after the supervisor's first entry.

        Returns:
            The newest entry that is not a process's output; None if there is none after
            `STARTED_S`.
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
        """Tell the job to save and end; return whether it has within `wait_s`.

        Args:
            wait_s: How long to wait for the supervisor to end.
            is_enough: Polled while waiting; true ends the wait.
        """
        with contextlib.suppress(ProcessLookupError, ValueError, FileNotFoundError):
            if self.is_running:
                os.kill(int((self.folder / PID_FILE).read_text()), STOP_SIGNAL)
        deadline = time.monotonic() + wait_s
        while self.is_running and time.monotonic() < deadline and not is_enough():
            time.sleep(POLL_S)
        return not self.is_running


def remove_old_logs(store: Store, *, keep: int) -> None:
    """Remove the folders of runs that have ended, except the newest `keep`."""
    ended = [
        folder
        for folder in (store.folder / RUNS).glob("*")
        if (folder / FILE).exists() and not is_held(folder / LOCK)
    ]
    newest_first = sorted(ended, key=lambda folder: (folder / FILE).stat().st_mtime, reverse=True)
    for folder in newest_first[keep:]:
        shutil.rmtree(folder, ignore_errors=True)
