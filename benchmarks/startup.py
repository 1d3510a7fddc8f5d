"""How long `import tpukit` and `tpukit --help` take. Target: under 0.3 s each, on an idle machine.

Processor time says the same on a busy one, as far as neighbours leave the caches alone.
"""

import os
import statistics
import sys
import time
from pathlib import Path

from claims import Claim, report

TARGET_S = 0.3
RUNS = 7


def median_of_runs(command: list[str]) -> tuple[float, float]:
    """Median wall and processor time of several runs in fresh processes."""
    silent = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    walls, busy = [], []
    for _ in range(RUNS):
        start = time.perf_counter()
        child = os.posix_spawn(command[0], command, os.environ, file_actions=silent)
        _, status, used = os.wait4(child, 0)
        walls.append(time.perf_counter() - start)
        busy.append(used.ru_utime + used.ru_stime)
        if status:
            raise SystemExit(f"{' '.join(command)} failed")
    return statistics.median(walls), statistics.median(busy)


def main() -> None:
    tpukit = str(Path(sys.executable).with_name("tpukit"))
    bare, _ = median_of_runs([sys.executable, "-c", "pass"])
    imported, _ = median_of_runs([sys.executable, "-c", "import tpukit"])
    helped, busy = median_of_runs([tpukit, "--help"])
    report(
        Claim("python -c pass (the floor)", bare, "s"),
        Claim("import tpukit", imported, "s", at_most=TARGET_S),
        Claim("tpukit --help", helped, "s", at_most=TARGET_S),
        Claim("tpukit --help, processor time", busy, "s"),
    )


if __name__ == "__main__":
    main()
