"""How long `import tpukit` and `tpukit --help` take. Target: under 0.3 s each."""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from claims import Claim, report

TARGET_S = 0.3
RUNS = 7


def median_of_runs(command: list[str]) -> float:
    """Median wall time of several runs in fresh processes."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    tpukit = str(Path(sys.executable).with_name("tpukit"))
    bare = median_of_runs([sys.executable, "-c", "pass"])
    imported = median_of_runs([sys.executable, "-c", "import tpukit"])
    helped = median_of_runs([tpukit, "--help"])
    report(
        Claim("python -c pass (the floor)", bare, "s"),
        Claim("import tpukit", imported, "s", at_most=TARGET_S),
        Claim("tpukit --help", helped, "s", at_most=TARGET_S),
    )


if __name__ == "__main__":
    main()
