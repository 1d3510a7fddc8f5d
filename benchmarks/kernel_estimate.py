"""What `tpukit kernel bench` is worth: its estimates against measured kernels, beside the targets.

    python benchmarks/kernel_estimate.py [--timings FILE] [--limit N | --all] [--json FILE]

This is `tpukit kernel bench --timings FILE --limit N` and nothing else. A row takes seconds to a
minute the first time; compiles are kept, so that a run that was stopped goes on where it was.
"""

import argparse
import json
import sys
from pathlib import Path

from claims import Claim, report
from rich.console import Console

from tpukit import configure_tpu_environment

DEFAULT_TIMINGS = Path(__file__).parent / "data" / "kernel_timings.json.gz"
LIMIT = 3
LEAST_SPEARMAN, MOST_ERROR, LEAST_NAMED = 0.9, 0.25, 0.9
LEAST_CASES = 5  # fewer say little of a rank


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timings", type=Path, default=DEFAULT_TIMINGS, help="measured rows")
    parser.add_argument("--limit", type=int, default=LIMIT, help="cases of each op and chip")
    parser.add_argument("--all", action="store_true", help="every row: hours the first time")
    parser.add_argument("--json", type=Path, help="write scores and every row here")
    options = parser.parse_args()
    configure_tpu_environment()  # or jax would look for a TPU in this process
    from tpukit.kernels.timing.measured import read_timings, score_timings

    score = score_timings(
        read_timings(options.timings),
        limit=None if options.all else options.limit,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    Console(width=140).print(score)
    report(*claims(score))
    if options.json:
        options.json.write_text(json.dumps(score.to_dict(), indent=1) + "\n")
    return 0


def claims(score) -> list[Claim]:
    """The figures that have a target: of groups with enough cases, and who is faster."""
    made: list[Claim] = []
    for group in score.groups:
        if group.cases < LEAST_CASES or group.spearman is None:
            continue
        name = f"{group.op} on {group.chip}, {group.rows} rows"
        # Five ranks with two neighbours swapped correlate by 0.9, as floats by 0.8999999999999998.
        rank = round(group.spearman, 9)
        made.append(Claim(f"{name}: Spearman", rank, "", at_least=LEAST_SPEARMAN))
        made.append(Claim(f"{name}: median error", group.median_error, "", at_most=MOST_ERROR))
    total = score.total
    if total is not None and total.compared:
        share = total.named_right / total.compared
        what = f"faster of Pallas and XLA named, {total.compared} cases"
        made.append(Claim(what, share, "", at_least=LEAST_NAMED))
    return made


if __name__ == "__main__":
    raise SystemExit(main())
