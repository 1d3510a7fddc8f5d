"""Fit the rates of `tpukit kernel bench` on measured Pallas kernels, and the errors they leave.

    python benchmarks/kernel_rates.py [--timings FILE] [--shapes N] [--write]

Each kernel is compiled and followed as the command does it, which says exactly what it does; three
constants of a chip say how fast that is done (rate_fitting.py). `--write` puts constants, errors
and the rows they stand on into src/tpukit/compiler/bundles/data/calibration.toml.
"""

import argparse
from pathlib import Path

from tpukit import configure_tpu_environment
from tpukit.errors import TPUError

DEFAULT_TIMINGS = Path(__file__).parent / "data" / "kernel_timings.json.gz"
RATES_FILE = Path(__file__).parents[1] / "src/tpukit/compiler/bundles/data/calibration.toml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timings", type=Path, default=DEFAULT_TIMINGS, help="measured rows")
    parser.add_argument("--shapes", type=int, default=5, help="of each op and chip")
    parser.add_argument("--write", action="store_true", help="into calibration.toml")
    options = parser.parse_args()
    configure_tpu_environment()  # or jax would look for a TPU in this process
    from rate_fitting import FITTED_MARK, Followed, as_toml, by_op, fit_rates, spread

    from tpukit.kernels.timing.measured import read_timings

    followed: list[Followed] = []
    for row in spread(read_timings(options.timings).rows, options.shapes):
        try:
            found = Followed.of(row)
        except TPUError as error:
            print(f"left out {row.describe()}: {error}", flush=True)
            continue
        followed.append(found)
        share = (found.parts.time_s or 0.0) * 1e6 / row.measured_us
        print(f"{row.describe()}: {share:.2f} of measured by the rates in use", flush=True)
    fitted = fit_rates(followed)
    print("\nKernels timed (model) by rates that were fitted on other shapes, against measured")
    for chip in fitted:
        for score in by_op(chip.estimated):
            rank = "-" if score.spearman is None else f"{score.spearman:.2f}"
            print(
                f"{score.op:<14} on {score.chip:<4} {score.rows:3d} kernels, "
                f"median error {score.median_error:6.1%}, Spearman {rank}"
            )
        for band in chip.errors:
            low, high = 1 - band.below, 1 + band.above
            print(f"{chip.chip} {band.kind}: measured {low:.2f} to {high:.2f} of the estimate")
    if options.write:
        head, _, _ = RATES_FILE.read_text().partition(FITTED_MARK)
        RATES_FILE.write_text(f"{head.rstrip()}\n\n{as_toml(fitted)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
