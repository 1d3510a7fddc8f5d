"""What `tpukit plan` costs: candidates a second, the wall time of the command, verification.

Targets: 20,000 candidates within 2 s on one core, the 70B command without verification within 5 s,
and with its best three verified by the compiler within 360 s on two cores (`--verified`; the
compile cache is a fresh one).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

from claims import Claim, report

from tpukit.planner.planning import plan
from tpukit.planner.search.candidates import PRECISIONS, Space
from tpukit.planner.search.search import Ask, Search

COMMAND = ["llama3.1-70b", "--tokens", "1e12", "--deadline", "30d"]
RUNS = 3


def candidates_in_two_seconds() -> list[Claim]:
    """Score the whole space, all precisions included, on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    asked = plan("llama3.1-70b", tokens=1e12, verify=0).ask
    wide = Ask(**{**vars(asked), "space": Space(precisions=PRECISIONS)})
    seconds, count = min((wall(wide) for _ in range(RUNS)), key=lambda pair: pair[0])
    return [
        Claim("candidates of the whole space", count, "", at_least=20_000),
        Claim("seconds for all of them, one core", seconds, "s"),
        Claim("seconds for 20,000 candidates", seconds / count * 20_000, "s", at_most=2),
    ]


def wall(ask: Ask) -> tuple[float, int]:
    """Seconds of one search, and how many it weighed."""
    started = time.perf_counter()
    found = Search.run(ask)
    return time.perf_counter() - started, len(found.scores.candidates)


def command_s(*more: str, environment: dict[str, str] | None = None) -> float:
    """Wall time of the command in its own process."""
    code = (
        "import typer; from tpukit.cli import plan\n"
        "app = typer.Typer(); app.command()(plan.plan); app()"
    )
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code, *COMMAND, *more],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
    )
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verified", action="store_true", help="also the verified run: minutes")
    asked = parser.parse_args()
    if asked.verified:
        with tempfile.TemporaryDirectory() as folder:
            seconds = command_s("--verify-seconds", "360", environment={"TPUKIT_CACHE_DIR": folder})
        report(Claim("70B, best three verified, wall", seconds, "s", at_most=360))
    before = os.times()
    quickest = min(command_s("--no-verify") for _ in range(RUNS))
    after = os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    report(
        Claim("70B, --no-verify, wall", quickest, "s", at_most=5),
        Claim("70B, --no-verify, processor time", used / RUNS, "s"),
    )
    report(*candidates_in_two_seconds())


if __name__ == "__main__":
    main()
