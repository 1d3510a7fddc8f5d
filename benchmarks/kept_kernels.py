"""Keep what the compiler made of measured programs, so that the suite scores them without it.

    python benchmarks/kept_kernels.py [--timings FILE] [--limit N] [--write]

The schedule of every program and the transfers and cycles of its kernels are facts: no rate is in
them. `tests/kernels/timing/measured/test_published_scores.py` times them by the rates in use, so
that a rate that moves is seen. Rows are those the rates of kernels were fitted on, and some that
XLA alone makes; a kernel with very many transfers is left out for its size.
"""

import argparse
import gzip
import json
import re
import sys
from pathlib import Path

from kernel_estimate import DEFAULT_TIMINGS

from tpukit import configure_tpu_environment
from tpukit.errors import TPUError

KEPT = Path(__file__).parents[1] / "tests/kernels/timing/measured/data/compiled_rows.json.gz"
LIMIT = 2
MOST_TRANSFERS = 5_000
# Most of a schedule's text: kernels' own programs, of which bundles were made, and source lines.
_BODY = re.compile(r'"body":"[^"]*"')
_SOURCES = re.compile(r"^FileNames\n.*?(?=^(?:%|ENTRY))", re.DOTALL | re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timings", type=Path, default=DEFAULT_TIMINGS, help="measured rows")
    parser.add_argument("--limit", type=int, default=LIMIT, help="cases of each op that XLA makes")
    parser.add_argument("--write", action="store_true", help=f"into {KEPT.name} of the suite")
    options = parser.parse_args()
    configure_tpu_environment()  # or jax would look for a TPU in this process
    kept = [found for row in chosen(options.timings, options.limit) if (found := facts(row))]
    text = json.dumps(kept, separators=(",", ":"))
    packed = gzip.compress(text.encode(), compresslevel=9, mtime=0)
    print(f"{len(kept)} rows, {len(packed) / 1e3:.0f} kB")
    if options.write:
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_bytes(packed)
    return 0


def chosen(timings: Path, limit: int):
    """The kernels that rates were fitted on, and some programs of XLA's."""
    from tpukit.kernels.timing.measured import read_timings
    from tpukit.kernels.timing.measured.rows import rows_in_view
    from tpukit.kernels.timing.measured.score import newest, sample

    rows = read_timings(timings).rows
    fitted = [row for row in rows if row.id in rows_in_view("kernels")]
    plain = [row for row in newest(rows)[0] if row.is_xla]
    return sorted([*fitted, *sample(plain, limit)], key=lambda row: row.id)


def facts(row) -> dict | None:
    """What a row measured and what was compiled for it; None where there is no program."""
    from tpukit.kernels.timing import profile_kernel
    from tpukit.kernels.timing.measured import program_of

    try:
        program = program_of(row)
        profile = profile_kernel(program.function, program.arguments, row.device)
    except TPUError as error:
        print(f"left out {row.describe()}: {error}", file=sys.stderr)
        return None
    transfers = sum(len(core.transfers) for call in profile.calls.values() for core in call.cores)
    if profile.reasons or transfers > MOST_TRANSFERS:
        print(f"left out {row.describe()}: {transfers} transfers", file=sys.stderr)
        return None
    return {
        "id": row.id,
        "chip": profile.chip.name,
        "op": row.op,
        "kind": program.kind,
        "measured_us": row.measured_us,
        "published": row.source_date,
        "versions": dict(profile.compiled.versions),
        "hlo": _SOURCES.sub("", _BODY.sub('"body":""', profile.compiled.hlo)),
        "calls": {name: call.to_data() for name, call in profile.calls.items()},
    }


if __name__ == "__main__":
    raise SystemExit(main())
