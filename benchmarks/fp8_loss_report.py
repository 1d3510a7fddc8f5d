"""The table and the curve of the loss study, from the result kept beside this script.

    python benchmarks/fp8_loss_report.py [RESULT.json]

A format's difference is taken seed by seed from the bfloat16 run of the same seed; its interval is
Student's, of 95 %. Writes docs/fp8_loss.svg.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

from claims import Claim, report

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "data" / "fp8_loss_study.json"
PICTURE = ROOT / "docs" / "fp8_loss.svg"
BASE = "bf16"
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}  # 97.5 %, by degrees of freedom
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 320, 70, 20, 40
COLOURS = ("#888888", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")


def by_format(result: dict, key: str) -> dict[str, list]:
    """What every run of a format has under `key`, in order of seeds."""
    found: dict[str, list] = defaultdict(list)
    for run in sorted(result["runs"], key=lambda run: run["seed"]):
        found[run["format"]].append(run[key])
    return found


def interval(differences: list[float]) -> tuple[float, float]:
    """The mean and how far from it the true one may lie."""
    n = len(differences)
    return mean(differences), STUDENT[n - 1] * stdev(differences) / n**0.5


def picture(result: dict) -> str:
    """Training losses of each format minus bfloat16's, means over seeds, as an SVG."""
    curves = by_format(result, "train")
    base = curves.pop(BASE)
    tokens = result["tokens"] / 1e6
    lines = {
        name: [
            mean(own[at] - other[at] for own, other in zip(runs, base, strict=True))
            for at in range(len(base[0]))
        ]
        for name, runs in curves.items()
    }
    # The first steps fall steeply: there the smallest shift in time is a large difference.
    first = len(base[0]) // 4
    high = max(abs(value) for line in lines.values() for value in line[first:]) * 1.1

    def x(at: int) -> float:
        return LEFT + (WIDTH - LEFT - 200) * (at - first) / (len(base[0]) - 1 - first)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value + high) / (2 * high))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for value in (-high / 1.1, 0.0, high / 1.1):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 200}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="#cccccc"/><text x="{LEFT - 6}" y="{y(value) + 4:.1f}" '
            f'text-anchor="end">{value:+.4f}</text>'
        )
    for colour, (row, (name, line)) in zip(COLOURS, enumerate(lines.items()), strict=False):
        points = " ".join(f"{x(at):.1f},{y(line[at]):.1f}" for at in range(first, len(line)))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(
            f'<text x="{WIDTH - 190}" y="{TOP + 18 * (row + 1)}" fill="{colour}">{name}</text>'
        )
    for at in (first, len(base[0]) - 1):
        parts.append(
            f'<text x="{x(at):.1f}" y="{HEIGHT - 20}" text-anchor="middle">'
            f"{tokens * (at + 1) / len(base[0]):.0f} M tokens</text>"
        )
    parts.append(
        f'<text x="{LEFT}" y="{HEIGHT - 4}">training loss minus bfloat16\'s (nats a byte), '
        f"mean of {len(base)} seeds</text></svg>"
    )
    return "\n".join(parts) + "\n"


def main() -> None:
    result = json.loads((Path(sys.argv[1]) if len(sys.argv) > 1 else RESULT).read_text())
    losses = by_format(result, "held_out")
    base = losses[BASE]
    print(f"{result['device']}, {result['parameters']:,} parameters, {result['tokens']:,} tokens")
    report(Claim(f"held-out loss, {BASE}, mean of {len(base)} seeds", mean(base), "nats"))
    for name, own in losses.items():
        if name == BASE:
            continue
        differences = [one - other for one, other in zip(own, base, strict=True)]
        middle, reach = interval(differences)
        seen = "none seen" if abs(middle) <= reach else "SEEN"
        print(
            f"{name:<26} {mean(own):.5f}  {middle:+.5f} ± {reach:.5f} nats "
            f"({100 * middle / mean(base):+.2f} ± {100 * reach / mean(base):.2f} %)  {seen}"
        )
    PICTURE.write_text(picture(result))
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
