"""Run every benchmark of this folder, each in its own process, then write the table of claims.

make bench
"""

import subprocess
import sys
from pathlib import Path

NOT_BENCHMARKS = ("run_all.py", "claim_table.py")


def is_benchmark(script: Path) -> bool:
    """Whether it runs by itself; the other files here are what benchmarks share."""
    return script.name not in NOT_BENCHMARKS and 'if __name__ == "__main__"' in script.read_text()


def run(script: Path) -> bool:
    """Whether a script ran to its end."""
    print(f"\n== {script.stem}", flush=True)
    return subprocess.run([sys.executable, str(script)]).returncode == 0


def main() -> int:
    here = Path(__file__).parent
    scripts = [script for script in sorted(here.glob("*.py")) if is_benchmark(script)]
    failed = [script.stem for script in scripts if not run(script)]
    if not run(here / "claim_table.py"):
        failed.append("claim_table")
    if failed:
        print(f"\ndid not run to the end: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
