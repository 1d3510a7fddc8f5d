"""Runs in processes of their own: started, followed and stopped from any terminal."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import TPUValidationError, did_you_mean
from ...runtime.interruption import whole_or_not_begun
from ..reconciler import KEEPERS
from ..store import Store
from ..store.locks import is_held
from .launch import RUNS, Launch
from .run_log import FILE, Entry, read_log

MODULE = "tpukit.pods.launching.runner"
PID_FILE = "pid"
ERRORS = "errors.txt"


@dataclass
class BackgroundRun:
    """A run that a process of its own supervises."""

    name: str
    folder: Path
    keeper: Path
    process: "subprocess.Popen[bytes] | None" = None

    @classmethod
    def start(cls, launch: Launch) -> "BackgroundRun":
        """Start the process that supervises a run; it outlives this one.

        What the job's processes get as variables may be secret: it travels through a pipe.
        """
        store = launch.manager.store
        launch.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (launch.folder / FILE).unlink(missing_ok=True)
        request = {
            "name": launch.name,
            "job": launch.job.to_dict(),
            "variables": dict(launch.environment),
            "provider": launch.manager.settings.provider_name,
            "folder": os.getcwd(),
        }
        run = cls(launch.name, launch.folder, store.folder / KEEPERS / launch.name)
        with (launch.folder / ERRORS).open("wb") as errors, whole_or_not_begun():
            run.process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                env={**os.environ, "TPUKIT_STATE_DIR": str(store.folder)},
                start_new_session=True,
            )
        assert run.process.stdin is not None
        (launch.folder / PID_FILE).write_text(str(run.process.pid))
        with contextlib.suppress(BrokenPipeError):
            run.process.stdin.write(json.dumps(request).encode())
            run.process.stdin.close()
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
        return cls(name, folder, store.folder / KEEPERS / name)

    @property
    def is_running(self) -> bool:
        """Whether somebody supervises it."""
        if self.process is not None:
            return self.process.poll() is None
        return is_held(self.keeper)

    def entries(self, *, follow: bool = True) -> Iterator[Entry]:
        """Yield what happened, and what happens until it ends."""
        last: Entry | None = None
        for entry in read_log(self.folder, is_running=lambda: self.is_running, follow=follow):
            last = entry
            yield entry
        if follow and (last is None or not last.is_final):
            errors = self.folder / ERRORS
            said = errors.read_text(errors="replace").strip() if errors.exists() else ""
            tail = said.splitlines()[-1] if said else "it was killed"
            yield Entry("error", f"the supervisor of {self.name} has ended: {tail}")

    def stop(self, wait_s: float) -> bool:
        """Let the job save and end, and tell whether it has within `wait_s`."""
        with contextlib.suppress(ProcessLookupError, ValueError, FileNotFoundError):
            if self.is_running:
                os.kill(int((self.folder / PID_FILE).read_text()), signal.SIGTERM)
        deadline = time.monotonic() + wait_s
        while self.is_running and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.is_running
