"""Causal attention without a TPU: our kernel against jax's and tokamax's, each at its best blocks.

    python benchmarks/attention_static.py --chips v6e --cases causal_4096 --directions forward

Every contender gets queries, keys and values as a projection makes them, (B, S, H * D), and gives
its result the same way, so scaling and transposes count on all sides. Times are static: the real
compiler's bundles, followed by `tpukit.kernels.timing`. The backward time is that of the gradient
alone, given what the forward pass keeps, each as it left it.

Ours runs with the blocks it ships with. Theirs are searched. At causal_4096 each kernel is timed
at the first sizes of the grid that attention_rivals/contenders.py states; those not more than 5 %
behind the fastest at the rest of it. The other cases begin with the best sizes found there, of the
kernels that were not more than 5 % behind. Then one size at a time is doubled or halved around the
best of each kernel not more than 15 % behind, until no step gains 1 %. Times are kept in a file, so
that a run that was cut short goes on where it stopped; `--grid`, `--rounds` and `--budget` bound
the search, and the table then says so. `--as-kept` makes the table of what is in the file.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from attention_rivals.blocks_search import Found, Searched, fastest, is_ended, near, search
from attention_rivals.cases import BASE, CASES
from attention_rivals.contenders import ANY, OURS, RIVALS, Family, Sizes, ours
from attention_rivals.times import Kept, Timing, identity_of, time_of
from rich.console import Console
from rich.table import Table

import tpukit

CHIPS = ("v5e", "v5p", "v6e", "7x")
DIRECTIONS = ("forward", "backward")
BARS = {"forward": 0.90, "backward": 1.00}
KEPT = Path(__file__).parent / "data" / "attention_static.json"


def main() -> int:
    """Time the contenders and show how ours compares with the best of the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--directions", default=",".join(DIRECTIONS))
    parser.add_argument("--rounds", type=int, help="steps of the search for their blocks, at most")
    parser.add_argument("--budget", type=int, help="choices tried around the best, at most")
    parser.add_argument("--grid", type=int, help="sizes of each grid tried, at most")
    parser.add_argument("--as-kept", action="store_true", help="time nothing that is not kept")
    parser.add_argument("--kept", type=Path, default=KEPT, help="file of their times")
    parser.add_argument("--json", type=Path, help="write the summary here too")
    asked = parser.parse_args()
    tpukit.configure_tpu_environment()
    # Places in the source are part of a kernel, and would make it another one for the cache.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    console = Console(width=150)
    kept, rows = Kept(asked.kept), list[dict[str, Any]]()
    for direction in asked.directions.split(","):
        for name in asked.cases.split(","):
            for chip in asked.chips.split(","):
                mine = time_of(ours(CASES[name]), CASES[name], chip, direction)
                theirs = rivals(name, chip, direction, kept, asked)
                console.print(table_of(chip, name, direction, mine, theirs.found))
                rows.append(summary(chip, name, direction, mine, theirs))
                if asked.json:
                    asked.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    console.print(summary_table(rows))
    return 0


def rivals(name: str, chip: str, direction: str, kept: Kept, asked: argparse.Namespace) -> Searched:
    """The times of the other kernels, from the file or made now, in the bounds that are asked."""
    bounds = {"rounds": asked.rounds, "budget": asked.budget}
    identity = identity_of(chip, direction)
    if asked.as_kept:
        base, found = (as_kept(f"{chip} {n} {direction}", identity, kept) for n in (BASE, name))
        searched = RIVALS if name == BASE else near(RIVALS, base)
        return Searched(found, is_ended(searched, found, CASES[name]))

    def timer_of(case: str) -> Callable[[Family, Sizes], Timing | str]:
        def timer(family: Family, sizes: Sizes) -> Timing | str:
            label = f"{chip} {case} {direction} {family.name} {sizes}"
            found = kept.load(label, identity)
            if found is None:
                forward, backward = (sizes, ANY) if direction == "forward" else (ANY, sizes)
                attend = family.make(CASES[case], forward, backward)
                found = (
                    "it cannot do this case"
                    if attend is None
                    else time_of(attend, CASES[case], chip, direction)
                )
                kept.store(label, identity, found)
            return found

        return timer

    starts: dict[Family, Sequence[Sizes]] = {family: family.grid[: asked.grid] for family in RIVALS}
    if name != BASE:
        base = search(starts, CASES[BASE], timer_of(BASE), **bounds).found
        best = {family: fastest(base, family.name) for family in near(RIVALS, base)}
        starts = {family: [one[0]] for family, one in best.items() if one is not None}
    return search(starts, CASES[name], timer_of(name), **bounds)


def as_kept(cell: str, identity: str, kept: Kept) -> Found:
    """All times of a cell that are in the file."""
    found: Found = {}
    for family in RIVALS:
        start = f"{cell} {family.name} "
        for label in kept.labels(start, identity):
            numbers, *scheduler = label.removeprefix(start).split()
            sizes = Sizes(*map(int, numbers.split("/")), scheduler=bool(scheduler))
            entry = kept.load(label, identity)
            if entry is not None:
                found[family.name, sizes] = entry
    return found


def summary(
    chip: str, case: str, direction: str, mine: Timing | str, theirs: Searched
) -> dict[str, Any]:
    """Ours, the best of the others, and the ratio the bar is on."""
    best = {family.name: fastest(theirs.found, family.name) for family in RIVALS}
    timed = {name: one for name, one in best.items() if one is not None}
    leader = min(timed, key=lambda name: timed[name][1], default=None)
    ratio = (
        mine.time_us / timed[leader][1] if leader is not None and isinstance(mine, Timing) else None
    )
    return {
        "chip": chip,
        "case": case,
        "direction": direction,
        "origin": "model",
        "ours_us": mine.time_us if isinstance(mine, Timing) else None,
        "best_other": leader,
        "best_other_blocks": None if leader is None else str(timed[leader][0]),
        "best_other_us": None if leader is None else timed[leader][1],
        "ratio": ratio,
        "bar": BARS[direction],
        "their_choices_timed": len(theirs.found),
        "searched_to_the_end": theirs.to_the_end,
    }


def summary_table(rows: list[dict[str, Any]]) -> Table:
    """One line a cell."""
    names = ("chip", "case", "direction", "ours us", "best other us", "who", "ratio", "bar")
    table = Table(*names, "their search")
    for row in rows:
        ours_us, other_us, ratio = (row[key] for key in ("ours_us", "best_other_us", "ratio"))
        extent = "to the end" if row["searched_to_the_end"] else "cut short"
        table.add_row(
            *(row[key] for key in ("chip", "case", "direction")),
            "-" if ours_us is None else f"{ours_us:.1f}",
            "-" if other_us is None else f"{other_us:.1f}",
            f"{row['best_other']} {row['best_other_blocks']}",
            "-" if ratio is None else f"{ratio:.2f}",
            "" if ratio is None else "met" if ratio <= row["bar"] else "MISSED",
            f"{row['their_choices_timed']} timed, {extent}",
        )
    return table


def table_of(chip: str, case: str, direction: str, mine: Timing | str, theirs: Found) -> Table:
    """The contenders from fast to slow."""
    rows = [(OURS, "as shipped", mine)]
    rows += [(family, str(sizes), found) for (family, sizes), found in theirs.items()]
    rows.sort(key=lambda row: row[2].time_us if isinstance(row[2], Timing) else float("inf"))
    title = f"{chip} {case} {direction} (static estimate, origin model)"
    table = Table("contender", "blocks", "total us", "kernel cycles", title=title)
    for family, blocks, found in rows:
        if isinstance(found, Timing):
            table.add_row(family, blocks, f"{found.time_us:.1f}", f"{found.kernel_cycles:,.0f}")
        else:
            table.add_row(family, blocks, "-", found)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
