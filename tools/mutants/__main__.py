"""How many small changes to the arithmetic the tests notice: `make mutants`.

    python tools/mutants [--sample 200] [--seed 1] [--only ROOM] [--workers 2]

Takes a seeded sample of changed operators, numbers, comparisons, swapped min and max, and dropped
terms, makes each in a copy of the repository, and runs the tests of its room that run the changed
line. What was found is kept in .cache/mutants, so that a run that was stopped goes on; a changed
file is tried again, and what survived is tried again when the tests of its room are others.
"""

import argparse
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).parent))

from changes import Change, changes_of
from outcomes import Outcomes
from rooms import ROOMS, Room
from trials import Copy, Trial

REPOSITORY = Path(__file__).parents[2]
KEPT = REPOSITORY / ".cache" / "mutants"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=200, help="changes, over all rooms")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=ROOMS, action="append", help="a room; repeat")
    parser.add_argument("--workers", type=int, default=2, help="changes tried at a time")
    asked = parser.parse_args()
    chosen = sample(asked.only or list(ROOMS), asked.sample, asked.seed)
    reached = True
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [
            Copy.of(REPOSITORY, Path(folder) / str(number)) for number in range(asked.workers)
        ]
        for name, changes in chosen.items():
            # Of the copy: the tree may be edited while this runs.
            outcomes = Outcomes(copies[0].root, ROOMS[name], KEPT / f"{name}.json")
            run(copies, ROOMS[name], changes, outcomes)
            reached = show(name, changes, outcomes) and reached
    return 0 if reached else 1


def sample(rooms: list[str], size: int, seed: int) -> dict[str, list[Change]]:
    """A seeded sample, as many of each room as its share of all changes.

    The first ones of a seeded order: a smaller sample is part of a larger one, and outcomes serve
    both.
    """
    every = {
        name: [one for file in ROOMS[name].members(REPOSITORY)
               for one in changes_of(REPOSITORY, file)]
        for name in rooms
    }  # fmt: skip
    total = sum(map(len, every.values()))
    for name, changes in every.items():
        random.Random(f"{seed} {name}").shuffle(changes)
    return {
        name: changes[: max(1, round(size * len(changes) / total))]
        for name, changes in every.items()
    }


def run(copies: list[Copy], room: Room, changes: list[Change], outcomes: Outcomes) -> None:
    """Try every change whose outcome is not known, one at a time in each copy."""
    missing = [change for change in changes if outcomes.find(change) is None]
    if not missing:
        return
    with ThreadPoolExecutor(len(copies)) as pool:
        # In each copy, for the bytecode that this leaves there.
        lines, *_ = pool.map(lambda copy: copy.lines_by_test(room), copies)
        free: SimpleQueue[Copy] = SimpleQueue()
        for copy in copies:
            free.put(copy)

        def trial(change: Change) -> Trial:
            copy = free.get()
            try:
                return copy.try_change(change, lines)
            finally:
                free.put(copy)

        trials = {pool.submit(trial, change): change for change in missing}
        for number, done in enumerate(as_completed(trials), 1):
            change, found = trials[done], done.result()
            outcomes.store(change, found)
            print(f"{number}/{len(missing)} {found.outcome}: {change}", file=sys.stderr, flush=True)


def show(name: str, changes: list[Change], outcomes: Outcomes) -> bool:
    """Print a room's score and what nothing noticed; whether its target is reached."""
    survived = [change for change in changes if outcomes.find(change) == Trial("survived")]
    noticed = len(changes) - len(survived)
    share, target = noticed / len(changes), ROOMS[name].target
    wanted = "" if target is None else f", target {target:.0%}"
    print(f"{name}: {noticed} of {len(changes)} changes noticed, {share:.1%}{wanted}")
    for change in survived:
        print(f"  nothing noticed {change}")
    return target is None or share >= target


if __name__ == "__main__":
    raise SystemExit(main())
