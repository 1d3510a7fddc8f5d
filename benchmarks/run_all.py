"""Run every benchmark of this folder, each in its own process: `make bench`."""

import subprocess
import sys
from pathlib import Path

NOT_BENCHMARKS = {"run_all.py", "claims.py", "published_rows.py"}


def main() -> int:
    failed = []
    for script in sorted(Path(__file__).parent.glob("*.py")):
        if script.name in NOT_BENCHMARKS:
            continue
        print(f"\n== {script.stem}", flush=True)
        if subprocess.run([sys.executable, str(script)]).returncode:
            failed.append(script.stem)
    if failed:
        print(f"\ndid not run to the end: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
