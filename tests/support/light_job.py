"""A job that needs no jax: counts steps, saves every fifth, and says how far it is.

Usage: light_job.py FOLDER STEPS [SECONDS_PER_STEP]; what it does wrong is in FOLDER/trouble.py.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from tpukit.records.reporting import report_step, report_stop

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.01
rank, attempt = int(os.environ["TPUKIT_HOST_ID"]), int(os.environ["TPUKIT_ATTEMPT"])
saved, trouble = folder / "saved.json", folder / "trouble.py"
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))


def save(step, total):
    partial = folder / f".saved-{rank}"
    partial.write_text(json.dumps([step, total]))
    partial.replace(saved)


step, total = json.loads(saved.read_text()) if saved.exists() else (0, 0.0)
(folder / f"pid-{rank}").write_text(str(os.getpid()))
while step < steps:
    if told:
        if rank == 0:
            save(step, total)
            report_stop(step, "preempted")
        sys.exit(0)
    if trouble.exists():
        exec(trouble.read_text())
    step += 1
    total = total * 0.9 + step  # so that a step done twice or not at all is seen
    time.sleep(pause_s)
    if rank == 0:
        if step % 5 == 0:
            save(step, total)
        report_step(step, total)
if rank == 0:
    save(step, total)
