"""Run the part of the suite that depends on jax and libtpu most, with other versions of them.

`make test-toolchains` runs a small part with every version of jax that was tried, but the running
one; names as arguments choose others, and --all runs everything that compiles, reads programs or
traces models. Environments are those of `tpukit check --toolchain`.
"""

import argparse
import os
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path

from tpukit.runtime.toolchains import Toolchain, environment, parse_toolchain, run_followed
from tpukit.runtime.toolchains.running import outside_environment
from tpukit.runtime.toolchains.toolchain import tried

ROOT = Path(__file__).parents[1]
# Programs, their memory and time by the compiler, one training step, its split over devices.
FEW = ("hardware", "compiler", "step", "parallel/mesh", "parallel/sharding")
# What compiles, reads programs or traces models; what is behind it has no jax, or only runs on it.
ALL = ("compiler", "checker", "models", "parallel", "step", "hardware")
# These need torch, which has its own pairs of versions.
LEFT_OUT = ("models/torch_module", "models/test_adapter_registry.py")
NEEDED = ("equinox", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "qwix")
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="toolchains; all that were tried by default")
    parser.add_argument("--workers", default="2", help="processes of pytest")
    parser.add_argument("--all", action="store_true", help="every test that depends on jax most")
    asked = parser.parse_args()
    others = [row["jax"] for row in tried() if row["jax"] != version("jax")]
    names = asked.names or [f"jax-{other}" for other in others]
    parts = ALL if asked.all else FEW
    found = {name: try_toolchain(parse_toolchain(name), parts, asked.workers) for name in names}
    print()
    for name, (summary, failed) in found.items():
        print(f"{name}: {summary}")
        for line in failed:
            print(f"  {line}")
    return int(any(failed for _, failed in found.values()))


def try_toolchain(
    toolchain: Toolchain, parts: tuple[str, ...], workers: str
) -> tuple[str, list[str]]:
    """Return what pytest counted, and a line for each test that failed."""
    pinned = dict(line.split("==") for line in constraints() if "==" in line)
    tested = toolchain.with_requirements(*(f"{name}=={pinned[name]}" for name in NEEDED))
    words = ["-m", "pytest", "-n", workers, "--dist", "loadgroup", "-p", "no:cacheprovider"]
    words += ["-rfE", "--tb=short", *(f"tests/{part}" for part in parts)]
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
