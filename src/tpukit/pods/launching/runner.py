"""`python -m tpukit.pods.launching.runner`: the supervisor process of one run.

It reads its request from standard input, so that process lists show nothing of it. It outlives the
terminal that started it. SIGUSR1 lets the job save and end. SIGTERM, which a machine that shuts
down sends, does the same, except where the provider runs the job itself: then it goes on.
"""

import json
import os
import signal
import sys
import threading
from typing import Any

from ...errors import TPUError
from ...exit_codes import ExitCode
from ...job.job import Job
from ..store import Store
from ..store.locks import holding
from ..supervision.supervisor import LeftRunning
from .background import STOP_SIGNAL
from .launch import LOCK, already_supervised, prepare_launch, run_folder
from .run_log import RunLog, RunLogEntry, code_of


def main() -> None:
    """Supervise the run that standard input describes."""
    stopping, leaving = threading.Event(), threading.Event()
    signal.signal(STOP_SIGNAL, lambda number, frame: stopping.set())
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: leaving.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command that shows the run
    request: dict[str, Any] = json.load(sys.stdin)
    os.chdir(request["folder"])
    store = Store()
    folder = run_folder(store, request["name"])
    with holding(folder / LOCK) as mine:
        if not mine:
            raise already_supervised(request["name"])
        log = RunLog(folder)
        try:
            log.write(_supervise(request, store, log, stopping, leaving))
        except TPUError as error:
            data = {"kind": type(error).__name__, "code": code_of(error)}
            log.write(RunLogEntry("error", str(error), data=data))
        except Exception as error:
            data = f"unexpected {type(error).__name__}: {error}"
            log.write(RunLogEntry("error", data, data={"code": int(ExitCode.FAILED)}))
            raise
        finally:
            log.close()


def _supervise(
    request: dict[str, Any],
    store: Store,
    log: RunLog,
    stopping: threading.Event,
    leaving: threading.Event,
) -> RunLogEntry:
    """Supervise the run until it ends, and return the last log entry."""
    ready = prepare_launch(
        Job.from_dict(request["job"]),
        provider=request["provider"],
        name=request["name"],
        variables=request["variables"],
        is_checked=True,
        state=store,
    )
    if stopping.is_set() or leaving.is_set():
        return RunLogEntry("error", "stopped before it began", data={"code": 0})
    try:
        outcome = ready.run(log.tell, stopping=stopping, leaving=leaving)
    except LeftRunning:
        text = (
            "the supervisor was told to end. The job goes on in its cluster: tpukit pods attach "
            f"{ready.name} shows it, launching it again supervises it"
        )
        return RunLogEntry("error", text, data={"code": int(ExitCode.DONE)})
    finally:
        log.flush()
    return RunLogEntry("outcome", str(outcome.ending), data=outcome.to_dict())


if __name__ == "__main__":
    main()
