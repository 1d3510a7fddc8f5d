"""Bundles of every op's kernels on every generation, as the compiler makes them today.

    python benchmarks/kernel_bundles.py [--write] [OP ...]

`--write` keeps them in tests/kernels/bundle_counts.json, which the tests hold kernels to.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tpukit
from tpukit.errors import TPUError

COUNTS = Path(__file__).parents[1] / "tests" / "kernels" / "bundle_counts.json"
CHIPS = ("v5e", "v5p", "v6e", "7x")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", help="ops to count; all by default")
    parser.add_argument("--write", action="store_true", help="keep the counts")
    options = parser.parse_args()
    tpukit.configure_tpu_environment()
    from tpukit.kernels.registry.registry import builtin_ops

    kept = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    for name in options.ops or builtin_ops():
        kept[name] = count(name)
        print(name, json.dumps(kept[name]["bundles"]))
        if options.write:
            ordered = {op: kept[op] for op in sorted(kept)}
            COUNTS.write_text(json.dumps(ordered, indent=1) + "\n")
    return 0


def count(name: str) -> dict[str, object]:
    """The counts of one op's first case, with its gradient where it has one."""
    from tpukit.kernels.registry.registry import get_tpu_op
    from tpukit.kernels.timing import count_bundles

    op = get_tpu_op(name)
    case, direction = op.cases[0], "backward" if op.differentiable else "forward"

    def one(chip: str) -> dict[str, int] | str:
        try:
            return count_bundles(op, case, chip, direction=direction)
        except TPUError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(CHIPS, pool.map(one, CHIPS), strict=True))
    return {"case": case.name, "direction": direction, "bundles": found}


if __name__ == "__main__":
    raise SystemExit(main())
