"""What `make demo` takes after the install, with nothing compiled before: clock and processor time.

    python benchmarks/rehearse.py

The target is 4 minutes on 2 cores; where other work shares them, look at processor time.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from claims import Claim, report

JOB = Path(__file__).parents[1] / "examples" / "rehearsal.yaml"
LONGEST_S = 240.0


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        fresh = {name: f"{folder}/{name}" for name in ("TPUKIT_CACHE_DIR", "TPUKIT_STATE_DIR")}
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "tpukit", "rehearse", JOB, "-o", f"{folder}/out", "--json"],
            env={**os.environ, **fresh},
            stdout=subprocess.PIPE,
            text=True,
        )
        wall_s = time.perf_counter() - began
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = json.loads(done.stdout)
    for stage in said["stages"]:
        print(f"{stage['stage']:>9} {stage['seconds']['value']:6.1f} s  {stage['verdict']}")
    report(
        Claim("a rehearsal from nothing compiled", wall_s, "s", at_most=LONGEST_S),
        Claim("its processor time", spent.ru_utime + spent.ru_stime, "s"),
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
