"""What another pair of jax and libtpu does to jobs: memory, predicted step, program, collectives.

Each job is checked with the running toolchain and with another one, whose environment is made where
it is not there yet. Rows are printed as docs/toolchains.md shows them.
"""

import argparse
from typing import Any

from claims import Claim, report

from tpukit.checker.report import Comparison
from tpukit.checker.toolchains import compare_toolchains
from tpukit.hardware.figure import bytes_text, seconds_text
from tpukit.runtime.toolchains import parse_toolchains
from tpukit.runtime.toolchains.toolchain import tried

FEW_LAYERS = "model={preset: mixtral-8x7b, n_layers: 4}"
JOBS = {
    "tiny, v6e-4": ["tiny", "--on", "v6e-4"],
    "llama3.2-1b, v5e-8, batch 16 x 2048": [
        *("llama3.2-1b", "--on", "v5e-8", "--batch", "16", "--sequence", "2048"),
    ],
    "llama3.1-8b, v6e-8, batch 24 x 2048, remat full": [
        *("llama3.1-8b", "--on", "v6e-8", "--batch", "24", "--sequence", "2048"),
        *("--remat", "full"),
    ],
    "llama3.1-8b, v5p-16, batch 16 x 4096": [
        *("llama3.1-8b", "--on", "v5p-16", "--batch", "16", "--sequence", "4096"),
    ],
    "mixtral-8x7b cut to 4 layers, v6e-16, batch 16 x 4096": [
        *("mixtral-8x7b", "--set", FEW_LAYERS, "--on", "v6e-16", "--batch", "16"),
        *("--sequence", "4096", "--mesh", "fsdp=4,expert=4"),
    ],
    "llama3.1-8b, tpu7x-2x2x1, batch 16 x 4096": [
        *("llama3.1-8b", "--on", "tpu7x-2x2x1", "--batch", "16", "--sequence", "4096"),
    ],
}
HEADINGS = ("job", "verdict", "HBM per device", "predicted step", "fusions", "collectives")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toolchain", default=f"jax-{tried()[0]['jax']}")
    parser.add_argument("--job", action="append", help="part of a job's name; all by default")
    asked = parser.parse_args()
    toolchains = parse_toolchains(asked.toolchain)
    print("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS))
    steps, memory, left = list[float](), list[float](), list[str]()
    for name, words in JOBS.items():
        if asked.job and not any(part in name for part in asked.job):
            continue
        found = compare_toolchains(toolchains, words)
        print(row(name, found), flush=True)
        changes = {one.name: one for one in found.changes_from_first(found.checks[-1])}
        for figure, into in (("step", steps), ("HBM per device", memory)):
            percent = changes[figure].percent if figure in changes else None
            if percent is None:
                left.append(f"{name}: no {figure} of both")
            else:
                into.append(abs(percent))
    for line in left:
        print(f"left out {line}")
    report(
        Claim("predicted step, largest change", max(steps, default=0), "%"),
        Claim("HBM per device, largest change", max(memory, default=0), "%"),
    )


def row(name: str, found: Comparison) -> str:
    first, last = found.checks[0], found.checks[-1]
    cells = [name, _both(first.verdict, last.verdict)]
    changes = {one.name: one for one in found.changes_from_first(last) if not one.is_part}
    for figure, text in (("HBM per device", bytes_text), ("step", seconds_text), ("fusions", str)):
        cells.append(_change(changes.get(figure), text))
    collectives = [_collectives(one.report or {}) for one in (first, last)]
    return "| " + " | ".join([*cells, _both(*collectives)]) + " |"


def _change(change: Any, text: Any) -> str:
    if change is None:
        return "–"
    if change.percent is None:
        return _both(str(change.before), str(change.after))
    percent = f"{change.percent:+.1f}".replace("-", "−")
    return f"{_both(text(change.before), text(change.after))} ({percent} %)"


def _collectives(report: Any) -> str:
    """How many of each kind run in a step, and how many bytes they move."""
    totals: dict[str, tuple[int, int]] = {}
    for one in report.get("collectives") or ():
        times, moved = totals.get(one["kind"], (0, 0))
        totals[one["kind"]] = times + one["times"], moved + one["bytes"] * one["times"]
    said = (f"{times} {kind} ({bytes_text(moved)})" for kind, (times, moved) in totals.items())
    return ", ".join(sorted(said)) or "none"


def _both(before: str, after: str) -> str:
    return before if before == after else f"{before} → {after}"


if __name__ == "__main__":
    main()
