"""The rates that `tpukit kernel bench` ships with: fitted on measured kernels, judged by others.

    python benchmarks/kernel_rates.py [--timings FILE] [--shapes N] [--write]
    python benchmarks/kernel_rates.py --errors [--timings FILE] [--limit N] [--on CHIP] [--write]

Each kernel is compiled and followed as the command does it, which says exactly what it does; two
constants of a chip say how fast that is done (rate_fitting.py). They are fitted on a few shapes of
each op and chip; `--errors` says how far they leave the kernels they were not fitted on.
`--write` puts either into src/tpukit/compiler/bundles/data/calibration.toml.
"""

import argparse
import sys
from pathlib import Path

from tpukit import configure_tpu_environment
from tpukit.errors import TPUError

DEFAULT_TIMINGS = Path(__file__).parent / "data" / "kernel_timings.json.gz"
CHIPS = ("7x", "v5e", "v5p", "v6e")
RATES_FILE = Path(__file__).parents[1] / "src/tpukit/compiler/bundles/data/calibration.toml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timings", type=Path, default=DEFAULT_TIMINGS, help="measured rows")
    parser.add_argument("--shapes", type=int, default=5, help="to fit on, of each op and chip")
    parser.add_argument("--errors", action="store_true", help="of the kernels not fitted on")
    parser.add_argument("--limit", type=int, help="cases of each op and chip for --errors")
    parser.add_argument("--on", action="append", help="chips for --errors; the others' stay")
    parser.add_argument("--write", action="store_true", help="into calibration.toml")
    options = parser.parse_args()
    configure_tpu_environment()  # or jax would look for a TPU in this process
    from rate_fitting import ERRORS_MARK, RATES_MARK

    head, _, rest = RATES_FILE.read_text().partition(RATES_MARK)
    rates, _, errors = rest.partition(ERRORS_MARK)
    if options.errors:
        errors = find_errors(options.timings, options.limit, options.on)
    else:
        rates = fit(options.timings, options.shapes)
    if options.write:
        RATES_FILE.write_text(
            f"{head}{RATES_MARK}{rates.removeprefix(RATES_MARK).rstrip()}\n\n"
            f"{ERRORS_MARK}{errors.removeprefix(ERRORS_MARK)}"
        )
    return 0


def fit(timings: Path, shapes: int) -> str:
    """Fit on some shapes; the constants as they are kept."""
    from rate_fitting import Followed, by_op, fit_rates, rates_as_toml, spread

    from tpukit.kernels.timing.measured import read_timings

    followed: list[Followed] = []
    for row in spread(read_timings(timings).rows, shapes):
        try:
            followed.append(Followed.of(row))
            print(f"followed {row.describe()}", flush=True)
        except TPUError as error:
            print(f"left out {row.describe()}: {error}", flush=True)
    fitted = fit_rates(followed)
    print("\nKernels timed (model) by rates that were fitted on other shapes, against measured")
    for chip in fitted:
        for score in by_op(chip.estimated):
            rank = "-" if score.spearman is None else f"{score.spearman:.2f}"
            print(
                f"{score.op:<14} on {score.chip:<4} {score.rows:3d} kernels, "
                f"median error {score.median_error:6.1%}, Spearman {rank}"
            )
    return rates_as_toml(fitted)


def find_errors(timings: Path, limit: int | None, chips: list[str] | None) -> str:
    """Score the kernels that the rates were not fitted on; the errors as they are kept."""
    from rate_fitting import error_bands, errors_as_toml

    from tpukit.compiler.bundles.calibration import error_bands_of
    from tpukit.kernels.timing.measured import Timings, read_timings, score_timings
    from tpukit.kernels.timing.measured.score import newest, sample

    read = read_timings(timings)
    programs = {row.program_key for row in sample(newest(read.rows)[0], limit) if row.is_pallas}
    kernels = tuple(row for row in read.rows if row.program_key in programs)
    score = score_timings(
        Timings(read.path, kernels, ()),
        chips=chips or (),
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    bands = error_bands(score.unseen)
    for chip, own in bands.items():
        for band in own:
            low, high = 1 - band.below, 1 + band.above
            print(
                f"{chip}: {', '.join(f'{n} {kind}' for kind, n in band.kinds.items())}, "
                f"median error {band.median:.1%}, "
                f"measured {low:.2f} to {high:.2f} of the estimate"
            )
    others = [chip for chip in CHIPS if chips and chip not in chips]
    stay = {chip: error_bands_of(chip) for chip in others}
    return errors_as_toml(dict(sorted({**stay, **bands}.items())))


if __name__ == "__main__":
    raise SystemExit(main())
