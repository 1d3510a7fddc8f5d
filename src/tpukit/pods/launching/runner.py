"""`python -m tpukit.pods.launching.runner`: the process that supervises one run.

It reads its request from standard input, so that nothing of it stands in a list of processes, and
outlives the terminal it was started from. SIGTERM lets the job save and end.
"""

import json
import os
import signal
import sys
import threading
from typing import Any

from ...errors import TPUError
from ...job.job import Job
from ...runtime.exit_codes import ExitCode
from ..store import Store
from ..store.locks import holding
from .launch import LOCK, already_supervised, prepare_launch, run_folder
from .result import code_of
from .run_log import RunLog, RunLogEntry


def main() -> None:
    """Supervise the run that standard input describes."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: stopping.set())
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
            log.write(_supervise(request, store, log, stopping))
        except TPUError as error:
            said = {"kind": type(error).__name__, "code": code_of(error)}
            log.write(RunLogEntry("error", str(error), data=said))
        except Exception as error:
            said = f"unexpected {type(error).__name__}: {error}"
            log.write(RunLogEntry("error", said, data={"code": int(ExitCode.FAILED)}))
            raise
        finally:
            log.close()


def _supervise(
    request: dict[str, Any], store: Store, log: RunLog, stopping: threading.Event
) -> RunLogEntry:
    """Supervise to the end, and return the last entry of the log."""
    ready = prepare_launch(
        Job.from_dict(request["job"]),
        provider=request["provider"],
        name=request["name"],
        variables=request["variables"],
        is_checked=True,
        state=store,
    )
    if stopping.is_set():
        return RunLogEntry("error", "stopped before it began", data={"code": 0})
    outcome = ready.run(log.tell, stopping=stopping)
    log.flush()
    return RunLogEntry("outcome", str(outcome.ending), data=outcome.to_dict())


if __name__ == "__main__":
    main()
