"""Estimated against measured kernel times, by constants fitted without the scored shape.

    python benchmarks/kernel_estimate.py [--timings FILE] [--by-impl] [--json FILE] [--fit]
    python benchmarks/kernel_estimate.py --static N [--timings FILE] [--fit]

Each kernel family has a small analytic model (kernel_rows/): tiles visited, padded matrix work,
HBM traffic, grid steps, in ideal microseconds of the device. Its constants, one non-negative factor
a term, are in kernel_rows/data/constants.json. They were fitted five times, each time without a
fifth of the shapes; a row whose shape was seen is estimated by the fit that left it out, any other
row by the fit on all. `--fit` makes the file anew from FILE.

`--static N` scores what `tpukit kernel bench` does instead, on N measured Pallas kernels of each
device and op: compiled offline, followed bundle by bundle, timed at rates fitted on other shapes.
A kernel takes from seconds to a minute, the first time. With `--fit` those rates and errors go to
src/tpukit/compiler/bundles/data/calibration.toml.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

from claims import Claim, report
from kernel_rows.calibration import DEFAULT_FILE, Calibration
from kernel_rows.families import Work, work_of
from kernel_rows.rows import Row, read_rows
from kernel_rows.scoring import LEAST_NAMED, Estimated, namings, scores

from tpukit import configure_tpu_environment

DEFAULT_TIMINGS = Path(__file__).parent / "data" / "kernel_timings.json.gz"
RATES_FILE = Path(__file__).parents[1] / "src/tpukit/compiler/bundles/data/calibration.toml"
FITTED_MARK = "# Fitted "
SOURCE = (
    "tokamax autotuning caches (openxla/tokamax@783ea957 with history) and published kernel "
    "benchmarks, measured on real v5e, v5p, v6e and TPU7x"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timings", type=Path, default=DEFAULT_TIMINGS, help="measured rows")
    parser.add_argument("--by-impl", action="store_true", help="one line an implementation")
    parser.add_argument("--json", type=Path, help="write scores and every row's figures here")
    parser.add_argument("--fit", action="store_true", help="fit the constants on these rows")
    parser.add_argument("--static", type=int, metavar="N", help="follow N kernels of each op")
    options = parser.parse_args()
    rows, wrong = read_rows(options.timings)
    if options.static:
        return score_static(rows, options.static, write=options.fit)
    works, left_out = modelled(rows)
    left_out.update(wrong)
    if options.fit:
        Calibration.fit(works, source=SOURCE).write(DEFAULT_FILE)
    estimated, without = estimate(works, Calibration.read())
    left_out.update(without)
    for reason, count in left_out.most_common():
        print(f"left out {count} rows: {reason}")
    show(estimated, by_impl=options.by_impl)
    if options.json:
        options.json.write_text(json.dumps(as_dict(estimated, left_out), indent=1) + "\n")
    return 0


def modelled(rows: list[Row]) -> tuple[list[Work], Counter[str]]:
    """The rows that have a model, and why the others have none."""
    works: list[Work] = []
    left_out: Counter[str] = Counter()
    for row in rows:
        try:
            work = work_of(row)
        except KeyError as error:
            work = f"its row says nothing of {error.args[0]}"
        except (TypeError, ValueError, ZeroDivisionError):
            work = "its row is not as the others are written"
        if isinstance(work, Work):
            works.append(work)
        else:
            left_out[f"{row.op} as {row.impl}: {work}"] += 1
    return works, left_out


def estimate(works: list[Work], calibration: Calibration) -> tuple[list[Estimated], Counter[str]]:
    """Each row's time, and the rows whose group has no constants."""
    estimated: list[Estimated] = []
    without: Counter[str] = Counter()
    for work in works:
        time_us = calibration.estimate_us(work)
        if time_us is None:
            without[f"{work.row.op} as {work.row.impl}: no row to fit its constants on"] += 1
        else:
            estimated.append(Estimated(work.row, time_us))
    return estimated, without


def show(estimated: list[Estimated], *, by_impl: bool) -> None:
    """Scores, then who was named the faster."""
    print("\nEstimated (model) against measured, each row by constants fitted without its shape")
    for score in scores(estimated, by_impl=by_impl):
        print(score)
    print("\nFaster of Pallas and XLA named right")
    named = namings(estimated)
    for one in named:
        print(one)
    totals = [one for one in named if one.op == "all"]
    if totals:
        share = sum(one.right for one in totals) / sum(one.compared for one in totals)
        report(Claim("named right over all devices", share, "", at_least=LEAST_NAMED))


def score_static(rows: list[Row], per_group: int, *, write: bool) -> int:
    """Follow some measured kernels, fit their rates, and say how far off they leave them."""
    configure_tpu_environment()  # or jax would look for a TPU in this process
    from kernel_rows.rates import as_toml, fit_rates
    from kernel_rows.static_timing import Followed, follow, spread

    followed: list[Followed] = []
    for row in spread(rows, per_group):
        found = follow(row)
        sizes = ", ".join(f"{name} {value}" for name, value in row.dims.items())
        if isinstance(found, str):
            print(f"left out {row.device} {row.op} ({sizes}): {found}", flush=True)
            continue
        followed.append(found)
        share = (found.parts.time_s or 0.0) * 1e6 / row.measured_us
        print(f"{row.device} {row.op} ({sizes}): {share:.2f} of measured", flush=True)
    fitted = fit_rates(followed)
    print("\nFollowed bundle by bundle (model) against measured, rates fitted on other shapes")
    for score in scores(one for chip in fitted for one in chip.estimated):
        print(score)
    for chip in fitted:
        for band in chip.errors:
            low, high = 1 - band.below, 1 + band.above
            print(f"{chip.chip} {band.kind}: measured {low:.2f} to {high:.2f} of the estimate")
    if write:
        head, _, _ = RATES_FILE.read_text().partition(FITTED_MARK)
        RATES_FILE.write_text(f"{head.rstrip()}\n\n{as_toml(fitted)}")
    return 0


def as_dict(estimated: list[Estimated], left_out: Counter[str]) -> dict[str, object]:
    """Everything shown, and every row."""
    return {
        "scores": [score.to_dict() for score in scores(estimated)],
        "scores_by_implementation": [one.to_dict() for one in scores(estimated, by_impl=True)],
        "named_right": [one.to_dict() for one in namings(estimated)],
        "left_out": dict(left_out),
        "rows": [
            {
                "id": one.row.id,
                "measured_us": one.row.measured_us,
                "estimate_us": round(one.estimate_us, 2),
            }
            for one in estimated
        ],
    }


if __name__ == "__main__":
    raise SystemExit(main())
