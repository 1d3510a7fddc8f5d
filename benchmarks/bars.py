"""Every bar that a benchmark was held to, as it was last found: kept in bars.json, shown as a page.

A benchmark that runs to its end keeps what it found (`claims.report`). Figures that documents state
come from claims.toml, with the bar they were held to, if any, and the command that makes them.
"""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from claim_table import stated_claims
from claims import Claim

ROOT = Path(__file__).parents[1]
KEPT, PAGE = ROOT / "benchmarks" / "bars.json", ROOT / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Written by `make bench`, which prints the same table. `make bench RUN=startup` (names of
`benchmarks/*.py`, or `all`, which takes hours and wants a GPU for some) runs benchmarks first, and
what they find goes in here. *load* is how many processes wanted a core when it ran: on a busy
machine times are longer than on an idle one. Rows without a load are figures that documents state.

## Bars

"""
STATED = """

## Figures of the documents

Every figure that README and docs state, with its date and how to make it again, is in
[claims](claims.md). The scripts that made them:

| script | figures stated | newest |
|---|---|---|
"""


def keep(script: str, claims: Iterable[Claim]) -> None:
    """Keep what a benchmark found, instead of what it found before."""
    rows = read()
    now = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "load": round(os.getloadavg()[0], 1)}
    found = rows.setdefault(script, {})
    for claim in claims:
        found[claim.what] = {**asdict(claim), **now}
    KEPT.write_text(json.dumps(rows, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def read() -> dict[str, dict[str, dict[str, object]]]:
    """What is kept, by script and by what was measured."""
    return json.loads(KEPT.read_text("utf-8")) if KEPT.is_file() else {}


def page() -> str:
    """The page: every bar with its verdict, then where other figures come from."""
    return HEAD + "\n".join(_bars()) + STATED + "\n".join(_stated()) + "\n"


def _bars() -> list[str]:
    lines = [
        "| benchmark | of what | found | target | | date | load |",
        "|---|---|---|---|---|---|---|",
    ]
    for script, rows in sorted(read().items()):
        for what, row in sorted(rows.items()):
            claim = Claim(**{name: row[name] for name in Claim.__dataclass_fields__})  # pyright: ignore[reportArgumentType]  as it was written
            cells = (
                *(script, what.replace("|", "\\|"), f"{claim.value:.4g} {claim.unit}".strip()),
                *(claim.target or "–", claim.verdict or "", row["date"], row["load"]),
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    for stated in sorted(stated_claims(), key=lambda one: one.script.stem):
        if bar := stated.bar.target:
            cells = (stated.script.stem, stated.what, stated.figure, bar, stated.bar.verdict)
            lines.append(f"| {' | '.join(cells)} | {stated.date} | |")
    return lines


def _stated() -> list[str]:
    by_script: dict[str, list[str]] = {}
    for claim in stated_claims():
        by_script.setdefault(claim.command, []).append(claim.date)
    return [
        f"| `{command}` | {len(dates)} | {max(dates)} |"
        for command, dates in sorted(by_script.items())
    ]


def missed() -> list[str]:
    """What is kept and does not clear its bar."""
    return [line for line in _bars() if "| MISSED |" in line]


if __name__ == "__main__":
    written = page()
    PAGE.write_text(written, "utf-8")
    sys.stdout.write(written)
