"""Print one table of every bar, as it was last found; benchmarks that are named run first.

make bench
make bench RUN="startup plan_speed"
make bench RUN=all
"""

import subprocess
import sys
from pathlib import Path

import bars

HERE = Path(__file__).parent
NOT_BENCHMARKS = ("run_all.py", "claim_table.py", "bars.py")


def is_benchmark(script: Path) -> bool:
    """Whether it runs by itself; the other files here are what benchmarks share."""
    return script.name not in NOT_BENCHMARKS and 'if __name__ == "__main__"' in script.read_text()


def run(script: Path) -> bool:
    """Whether a script ran to its end."""
    print(f"\n== {script.stem}", flush=True)
    return subprocess.run([sys.executable, str(script)]).returncode == 0


def main(names: list[str]) -> int:
    known = {script.stem: script for script in sorted(HERE.glob("*.py")) if is_benchmark(script)}
    if unknown := [name for name in names if name not in (*known, "all")]:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    asked = list(known) if "all" in names else names
    failed = [name for name in asked if not run(known[name])]
    if asked and not run(HERE / "claim_table.py"):
        failed.append("claim_table")
    if not run(HERE / "bars.py"):
        failed.append("bars")
    if failed:
        print(f"\ndid not run to the end: {', '.join(failed)}", file=sys.stderr)
    for line in bars.missed():
        print(f"missed: {line}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
