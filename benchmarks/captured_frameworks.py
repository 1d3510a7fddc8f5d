"""Steps of other people's trainers, captured unmodified, beside their published times.

    python benchmarks/captured_frameworks.py --maxtext PYTHON --levanter PYTHON [--only TEXT]
                                             [--code CHECKOUT] [--work DIR] [--recorded]

Each row of data/captured_frameworks.json is a published run with its settings. Its trainer runs as
`tpukit check --on SLICE --json -- python -m …` in an environment of its own, and the predicted
step goes into the row, with the version of the trainer that was captured. `--recorded` runs
nothing and scores what is written.

The measured code is seldom the captured one: published runs name a day, not a version. Rows that
need a file of the experiment (an optimizer that Levanter does not have) name it as `code`, and
take it from a checkout of Marin's repository.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from claims import Claim, report
from framework_commands import command_of

DATA = Path(__file__).parent / "data" / "captured_frameworks.json"
PACKAGES = ("maxtext", "marin-levanter", "levanter")  # Levanter had its own name until 2025
BARS = {"maxtext": 0.05, "levanter": None}
LIMIT_S = 1800


def capture(row: dict[str, Any], python: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what `tpukit check` finds of a row, or raise its reason."""
    folder = options.work / row["framework"]
    folder.mkdir(parents=True, exist_ok=True)
    code = None if options.code is None else options.code.resolve()
    trainer = version_of(python)
    command = command_of(row, python, folder, code=code, trainer=trainer)
    tpukit = str(Path(sys.executable).with_name("tpukit"))
    page = folder / f"{row['name'].replace('/', '-')}-{row['on']}.html"
    started = time.perf_counter()
    ended = subprocess.run(
        [
            *(tpukit, "check", "--on", row["on"]),
            *("--json", "--html", str(page), "--timeout", str(LIMIT_S)),
            "--",
            *command.words,
        ],
        cwd=command.folder,
        env={**os.environ, **command.environment},
        capture_output=True,
        text=True,
    )
    if not ended.stdout.strip().startswith("{"):
        raise RuntimeError(ended.stderr.strip()[-1500:] or f"exit code {ended.returncode}")
    found = json.loads(ended.stdout)
    about = found["capture"]
    return {
        "predicted_s": about["step_time_s"]["value"],
        "fits": found["verdict"] == "fits",
        "hbm_bytes": found["memory"]["total_bytes"],
        "trainer": trainer,
        "jax": about["versions"]["jax"],
        "compiler": ", ".join(f"{name} {number}" for name, number in found["versions"].items()),
        "kernels": sorted({name for one in about["listed"] for name in one["kernels"]}),
        "capture_s": about["capture_s"]["value"],
        "compile_s": found["compile"]["compile_s"]["value"],
        "total_s": round(time.perf_counter() - started, 1),
        "host_peak_bytes": about["peak_bytes"]["value"],
        "date": f"{date.today()}",
    }


def version_of(python: str) -> str:
    """Return name and version of the trainer that an environment has."""
    text = (
        "import importlib.metadata as m\n"
        f"known = {{d.name: d.version for d in m.distributions() if d.name in {PACKAGES!r}}}\n"
        "print(' '.join(next(iter(known.items()))))"
    )
    found = subprocess.run([python, "-c", text], capture_output=True, text=True)
    if found.returncode:
        raise FileNotFoundError(f"{python} has none of {', '.join(PACKAGES)}")
    return found.stdout.strip()


def show(row: dict[str, Any], found: dict[str, Any]) -> None:
    """Print one row: predicted, measured, their ratio, and the code that was captured."""
    step = found["predicted_s"]
    ratio = "" if step is None else f"{step / row['measured_s']:.3f}"
    predicted = "–" if step is None else f"{step:.4f}"
    verdict = "" if found["fits"] else "  does not fit"
    print(
        f"{row['name']:<40} {row['on']:<8} predicted {predicted:>8} s  measured "
        f"{row['measured_s']:>8.4f} s  {ratio:>6}  {found['trainer']}, jax {found['jax']}{verdict}",
        flush=True,
    )


def ratios_of(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """Return predicted over measured of every row, by framework and version of the trainer."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for one in row.get("captured", ()):
            if one["predicted_s"]:
                ratio = one["predicted_s"] / row["measured_s"]
                found.setdefault((row["framework"], one["trainer"]), []).append(ratio)
    return found


def kept_spreads() -> set[str]:
    """Return the least and the largest ratio of each trainer, as documents state them."""
    kept = ratios_of(json.loads(DATA.read_text())).values()
    return {f"{min(ratios):.3f} to {max(ratios):.3f}" for ratios in kept}


def score(rows: list[dict[str, Any]]) -> None:
    """Print the spread of predicted over measured per framework and version of it."""
    for (framework, trainer), ratios in ratios_of(rows).items():
        errors = [abs(ratio - 1) for ratio in ratios]
        report(
            Claim(f"{trainer}: rows", len(ratios), ""),
            Claim(f"{trainer}: predicted / measured, median", statistics.median(ratios), ""),
            Claim(f"{trainer}: predicted / measured, least", min(ratios), ""),
            Claim(f"{trainer}: predicted / measured, most", max(ratios), ""),
            Claim(f"{trainer}: largest error", max(errors), "", at_most=BARS[framework]),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--maxtext", help="the interpreter of an environment that has MaxText")
    parser.add_argument("--levanter", help="the same for Levanter")
    parser.add_argument("--only", default="", help="rows whose name or slice contains this")
    parser.add_argument("--code", type=Path, help="a checkout of marin-community/marin")
    parser.add_argument("--work", type=Path, default=Path("captured-frameworks"))
    parser.add_argument("--recorded", action="store_true", help="score what was written")
    options = parser.parse_args()
    options.work = options.work.resolve()
    rows: list[dict[str, Any]] = json.loads(DATA.read_text())
    chosen = [
        row for row in rows if options.only in f"{row['framework']}/{row['name']}@{row['on']}"
    ]
    for row in chosen:
        python = getattr(options, row["framework"])
        if not options.recorded and python is not None:
            try:
                keep(row, capture(row, python, options))
            except (RuntimeError, FileNotFoundError) as error:
                print(f"{row['name']} on {row['on']}: not captured: {error}", flush=True)
        for found in row.get("captured", ()):
            show(row, found)
    score(chosen)


def keep(row: dict[str, Any], found: dict[str, Any]) -> None:
    """Write one row's result beside those of other versions of the trainer."""
    others = [one for one in row.get("captured", ()) if one["trainer"] != found["trainer"]]
    row["captured"] = [*others, found]
    rows = json.loads(DATA.read_text())  # others may have been written since this run began
    same = [(row["name"], row["on"]) == (one["name"], one["on"]) for one in rows]
    rows[same.index(True)] = row
    DATA.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
