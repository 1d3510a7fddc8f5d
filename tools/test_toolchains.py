"""Run the part of the suite that depends on jax and libtpu most, with other versions of them.

`make test-toolchains` runs it for the newest pair that was tried, on every Python it installs on;
names as arguments choose others. Environments are those of `tpukit check --toolchain`.
"""

import argparse
import os
import re
import sys
import time
from pathlib import Path

from tpukit.runtime.toolchains import Toolchain, environment, parse_toolchain, run_followed
from tpukit.runtime.toolchains.running import outside_environment
from tpukit.runtime.toolchains.toolchain import tried

ROOT = Path(__file__).parents[1]
# What compiles, reads programs or traces models; what is behind it has no jax, or only runs on it.
PARTS = ("compiler", "checker", "models", "parallel", "step", "hardware")
# These need torch, which has its own pairs of versions.
LEFT_OUT = ("models/torch_module", "models/test_adapter_registry.py")
NEEDED = ("equinox", "hypothesis", "pytest", "pytest-xdist")
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="toolchains; the newest on each Python by default")
    parser.add_argument("--workers", default="2", help="processes of pytest")
    asked = parser.parse_args()
    newest = tried()[0]
    names = asked.names or [f"jax-{newest['jax']}-py{python}" for python in newest["pythons"]]
    found = {name: try_toolchain(parse_toolchain(name), asked.workers) for name in names}
    print()
    for name, (summary, failed) in found.items():
        print(f"{name}: {summary}")
        for line in failed:
            print(f"  {line}")
    return int(any(failed for _, failed in found.values()))


def try_toolchain(toolchain: Toolchain, workers: str) -> tuple[str, list[str]]:
    """Return what pytest counted, and a line for each test that failed."""
    pinned = dict(line.split("==") for line in constraints() if "==" in line)
    tested = toolchain.with_requirements(*(f"{name}=={pinned[name]}" for name in NEEDED))
    words = ["-m", "pytest", "-n", workers, "--dist", "loadgroup", "-p", "no:cacheprovider"]
    words += ["-rfE", "--tb=short", *(f"tests/{part}" for part in PARTS)]
    words += [f"--ignore=tests/{one}" for one in LEFT_OUT]
    started = time.monotonic()
    with environment(tested, progress=print) as python:
        variables = {**outside_environment(), "PYTHONPATH": str(ROOT / "src")}
        ended = run_followed(
            [python, *words], environment=variables, follow="output", progress=show
        )
    lines = ended.output.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    counts = next((line for line in reversed(lines) if _COUNT.search(line)), "")
    if ended.code not in (0, 1):
        failed.append(f"pytest ended with {ended.code}: {(ended.errors or ended.output)[-2000:]}")
    said = ", ".join(" ".join(one) for one in _COUNT.findall(counts)) or "nothing was counted"
    return f"{said} in {time.monotonic() - started:.0f} s", failed


def constraints() -> list[str]:
    return (ROOT / "constraints.txt").read_text().splitlines()


def show(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
