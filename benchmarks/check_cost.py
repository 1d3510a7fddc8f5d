"""What `tpukit check` costs: seconds to the first line, to the verdict, to the step, and memory.

Targets for llama3.1-8b on v6e-8 and v6e-256: first line within 1 s, verdict on memory within 35 s,
predicted step within 90 s, the same again within 3 s, and 2.5 GB for parent and child together.
MaxText's own check of the same model on v6e-8 took 617 s and 5.8 GB on a machine like this one.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from claims import Claim, report

CASES = {"v6e-8": 24, "v6e-256": 768}
POLL_S = 0.05


@dataclass
class Cost:
    """Of one run."""

    first_line_s: float
    verdict_s: float
    total_s: float
    peak_rss_bytes: int


def measure(command: list[str], environment: dict[str, str]) -> Cost:
    """Run the command, watching its output and the memory of all its processes."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    seen: dict[str, float] = {}

    def watch_errors() -> None:
        for _ in process.stderr:
            seen.setdefault("first", time.perf_counter() - start)

    def watch_output() -> None:
        for line in process.stdout:
            if line.startswith(("FITS", "DOES NOT FIT")):
                seen.setdefault("verdict", time.perf_counter() - start)

    watchers = [threading.Thread(target=watch) for watch in (watch_errors, watch_output)]
    for watcher in watchers:
        watcher.start()
    peak = 0
    while process.poll() is None:
        peak = max(peak, tree_rss(process.pid))
        time.sleep(POLL_S)
    total = time.perf_counter() - start
    for watcher in watchers:
        watcher.join()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} exited with {process.returncode}")
    return Cost(seen["first"], seen["verdict"], total, peak)


def tree_rss(pid: int) -> int:
    """Resident memory of a process and everything it started."""
    total = 0
    try:
        parent = psutil.Process(pid)
        for one in (parent, *parent.children(recursive=True)):
            total += one.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return total


def main() -> None:
    tpukit = str(Path(sys.executable).with_name("tpukit"))
    for slice_name, batch in CASES.items():
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "TPUKIT_CACHE_DIR": cache, "PYTHONUNBUFFERED": "1"}
            command = [tpukit, "check", "llama3.1-8b", "--on", slice_name, "--batch", str(batch)]
            fresh = measure(command, environment)
            again = measure(command, environment)
        name = f"llama3.1-8b on {slice_name}"
        report(
            Claim(f"{name}: first progress line", fresh.first_line_s, "s", at_most=1),
            Claim(f"{name}: verdict on memory", fresh.verdict_s, "s", at_most=35),
            Claim(f"{name}: predicted step", fresh.total_s, "s", at_most=90),
            Claim(f"{name}: the same again", again.total_s, "s", at_most=3),
            Claim(f"{name}: peak memory", fresh.peak_rss_bytes / 1e9, "GB", at_most=2.5),
        )


if __name__ == "__main__":
    main()
