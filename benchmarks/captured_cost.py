"""What the verdict on an unmodified program costs: seconds, and memory of its process.

    python benchmarks/captured_cost.py [--only TEXT]

`captured_trainer.py` is run as if on 8 to 4,096 chips, with four sizes of a model. Targets: the
program's process stays within 2 GB beside what its imports take, and the verdict on memory takes at
most 30 s beside imports and the compiler's own time.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from captured_trainer import SIZES
from claims import Claim, report

from tpukit import check_program
from tpukit.errors import TPUError
from tpukit.hardware.figure import bytes_text

SLICES = {"v6e-8": 8, "v5p-128": 64, "v5p-1024": 512, "v5p-8192": 4096}
SCRIPT = Path(__file__).with_name("captured_trainer.py")
HEADINGS = (
    *("size", "chips", "verdict", "seconds to it", "of that compiler", "of that the rest"),
    *("host memory", "beside imports"),
)
IMPORTS = """
import time
started = time.perf_counter()
import jax, optax, numpy
took = time.perf_counter() - started
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(took, int(peak.split()[1]) * 1024)
"""


@dataclass(frozen=True)
class Imports:
    """What the program's imports take by themselves."""

    seconds: float
    peak_bytes: int

    @classmethod
    def measured(cls) -> "Imports":
        """Import the same modules in a process of their own."""
        command = [sys.executable, "-c", IMPORTS]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        said = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment
        ).stdout.split()
        return cls(float(said[0]), int(said[1]))


@dataclass(frozen=True)
class Cost:
    """Of one capture, without anything kept from an earlier one."""

    verdict_s: float
    compile_s: float
    peak_bytes: int
    fits: bool


def measure(size: str, slice_name: str) -> Cost:
    """Run the script as if on a slice, up to the verdict on memory."""
    seen: list[float] = []
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TPUKIT_CACHE_DIR"] = cache
        found = check_program(
            [sys.executable, str(SCRIPT), "--size", size],
            slice_name,
            memory_only=True,
            verdict=lambda _: seen.append(time.perf_counter() - started),
        )
    assert found.captured is not None
    return Cost(seen[0], found.compiled.compile_s, found.captured.peak_bytes, found.fits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this: 8b@v6e-8")
    asked = parser.parse_args()
    imports = Imports.measured()
    print(f"imports: {imports.seconds:.1f} s, {bytes_text(imports.peak_bytes)}")
    print("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS))
    memory, rest = list[float](), list[float]()
    for size, slice_name in itertools.product(SIZES, SLICES):
        if asked.only not in f"{size}@{slice_name}":
            continue
        chips = SLICES[slice_name]
        try:
            cost = measure(size, slice_name)
        except TPUError as error:
            print(f"| {size} | {chips:,} | {error} |", flush=True)
            continue
        memory.append((cost.peak_bytes - imports.peak_bytes) / 1e9)
        rest.append(cost.verdict_s - cost.compile_s - imports.seconds)
        cells = (
            *(size, f"{chips:,}", "fits" if cost.fits else "does not fit"),
            *(f"{seconds:.0f}" for seconds in (cost.verdict_s, cost.compile_s, rest[-1])),
            *(bytes_text(cost.peak_bytes), f"{memory[-1]:.2f} GB"),
        )
        print("| " + " | ".join(cells) + " |", flush=True)
    report(
        Claim("host memory beside imports, most", max(memory, default=0), "GB", at_most=2),
        Claim("verdict beside imports and compiler, most", max(rest, default=0), "s", at_most=30),
    )


if __name__ == "__main__":
    main()
