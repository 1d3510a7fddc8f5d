"""Run every benchmark of this folder, each in its own process: `make bench`."""

import subprocess
import sys
from pathlib import Path


def is_benchmark(script: Path) -> bool:
    """Whether it runs by itself; the other files here are what benchmarks share."""
    return script.name != "run_all.py" and 'if __name__ == "__main__"' in script.read_text()


def main() -> int:
    failed = []
    for script in sorted(Path(__file__).parent.glob("*.py")):
        if not is_benchmark(script):
            continue
        print(f"\n== {script.stem}", flush=True)
        if subprocess.run([sys.executable, str(script)]).returncode:
            failed.append(script.stem)
    if failed:
        print(f"\ndid not run to the end: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
