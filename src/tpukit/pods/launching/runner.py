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
from ..store import Store
from .launch import prepare_launch, run_folder
from .run_log import Entry, RunLog


def main() -> None:
    """Supervise the run that standard input describes."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: stopping.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command that shows the run
    request: dict[str, Any] = json.load(sys.stdin)
    os.chdir(request["folder"])
    store = Store()
    log = RunLog(run_folder(store, request["name"]))
    try:
        ready = prepare_launch(
            Job.from_dict(request["job"]),
            provider=request["provider"],
            name=request["name"],
            variables=request["variables"],
            state=store,
        )
        if stopping.is_set():
            log.write(Entry("error", "stopped before it began", data={"code": 0}))
            return
        outcome = ready.run(log.tell, stopping=stopping)
        log.flush()
        log.write(Entry("outcome", str(outcome.ending), data=outcome.to_dict()))
    except TPUError as error:
        log.write(Entry("error", str(error), data={"kind": type(error).__name__}))
    except Exception as error:
        log.write(Entry("error", f"unexpected {type(error).__name__}: {error}"))
        raise
    finally:
        log.close()


if __name__ == "__main__":
    main()
