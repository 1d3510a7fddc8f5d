"""One table of every performance claim: what it compares, how it was made, and when.

    python benchmarks/claim_table.py

claims.toml holds the figures; the table goes to docs/claims.md, which README and docs refer to.
Figures whose rows are kept as data are reckoned anew from it and have to agree.
"""

import json
import math
import statistics
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from claims import Claim

from tpukit.hardware.scored_steps import ScoredSteps

ROOT = Path(__file__).parents[1]
CLAIMS, TABLE = ROOT / "benchmarks" / "claims.toml", ROOT / "docs" / "claims.md"
SIDES = ("model", "compiler", "measured", "published", "target")
SAMPLES = {"out": "out of sample", "in": "in sample", "none": "nothing fitted"}
HEAD = """# What is claimed, and how it was found

Made by `make bench` (or `python benchmarks/claim_table.py`) from `benchmarks/claims.toml`; a test
holds the documents to it. *model* is a predicted time, *compiler* a figure of the real compiler,
*measured* one of our runs, *published* a run of somebody else's. *In sample* means that constants,
or what is counted at all, were chosen with the same rows in view. `python benchmarks/documents.py`
prints the figures of the documents that tpukit was asked for by, beside ours.

| figure | of what | compares | | date | command |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class StatedClaim:
    """A figure as the documents state it.

    Attributes:
        compares: Two of `SIDES`, with a colon between them.
        sample: One of `SAMPLES`.
        docs: Documents that state it, in the words of `figure`.
        worst: The figure as a number, the worst of them where it states several.
        at_most: The bar it was held to, where it had one; so `at_least`.
    """

    what: str
    figure: str
    date: str
    command: str
    compares: str
    sample: str
    docs: tuple[str, ...]
    worst: float = math.nan
    at_most: float | None = None
    at_least: float | None = None

    @property
    def bar(self) -> Claim:
        """The figure against its bar."""
        return Claim(self.what, self.worst, "", self.at_most, self.at_least)

    @property
    def script(self) -> Path:
        """The benchmark that makes it."""
        return ROOT / self.command.split()[1]

    @property
    def row(self) -> str:
        """Its line of the table."""
        sample = SAMPLES[self.sample]
        return (
            f"| {self.figure} | {self.what} | {self.compares} | {sample} | {self.date} "
            f"| `{self.command}` |"
        )


def stated_claims() -> list[StatedClaim]:
    """Every claim of the file."""
    entries = tomllib.loads(CLAIMS.read_text())["claim"]
    return [StatedClaim(**{**entry, "docs": tuple(entry["docs"])}) for entry in entries]


def kept_figures() -> dict[str, set[str]]:
    """Figures of benchmarks whose rows are kept as data, by script, reckoned from those rows."""
    from captured_frameworks import kept_spreads
    from plan_layouts import FOUND, gains

    steps = ScoredSteps.shipped()
    errors = [one.error for one in steps.counted]
    pairs = gains(json.loads(FOUND.read_text())).values()
    layouts: set[str] = set()
    for side in (0, 1):
        values = [pair[side] for pair in pairs]
        layouts.add(f"{sum(value >= 0 for value in values)} of {len(values)}")
        layouts.add(f"{100 * statistics.median(values):.0f} %")
    return {
        "predict.py": {
            *(f"{100 * share:.1f} %" for share in (statistics.median(errors), max(errors))),
            f"{100 * statistics.mean(errors):.1f} %",
            f"{steps.covered} of {len(steps.counted)}",
        },
        "plan_layouts.py": layouts,
        "captured_frameworks.py": kept_spreads(),
    }


def table() -> str:
    """The page."""
    return HEAD + "\n".join(claim.row for claim in stated_claims()) + "\n"


def main() -> int:
    TABLE.write_text(table())
    print(table())
    wrong = [
        f"{claim.figure} ({claim.what}): {claim.script.name} kept {', '.join(sorted(kept))}"
        for claim in stated_claims()
        if (kept := kept_figures().get(claim.script.name)) and claim.figure not in kept
    ]
    for line in wrong:
        print(f"not what was found: {line}", file=sys.stderr)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
