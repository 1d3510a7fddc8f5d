"""How many small changes to the arithmetic the tests notice: `make mutants`.

    python tools/mutants [--sample 200] [--seed 1] [--only ROOM] [--survivors]

Takes a seeded sample of changed operators, numbers, comparisons, swapped min and max, and dropped
terms, makes each in a copy of the repository, and runs the tests of its room that run the changed
line. What was found is kept in .cache/mutants, so that a run that was stopped goes on; a file or a
folder of tests that changed is tried again, and `--survivors` tries again what nothing noticed.
"""

import argparse
import hashlib
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from changes import Change, changes_of
from rooms import ROOMS, Room
from trials import Copy, LinesByTest

REPOSITORY = Path(__file__).parents[2]
KEPT = REPOSITORY / ".cache" / "mutants"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=200, help="changes, over all rooms")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=ROOMS, action="append", help="a room; repeat")
    parser.add_argument("--survivors", action="store_true", help="try again what survived")
    asked = parser.parse_args()
    chosen = sample(asked.only or list(ROOMS), asked.sample, asked.seed)
    reached = True
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy.of(REPOSITORY, Path(folder) / "repository")
        for name, changes in chosen.items():
            kept = Kept(KEPT / f"{name}.json", again=asked.survivors)
            run(copy, ROOMS[name], changes, kept)
            reached = show(name, changes, kept) and reached
    return 0 if reached else 1


def sample(rooms: list[str], size: int, seed: int) -> dict[str, list[Change]]:
    """A seeded sample, as many of each room as its share of all changes."""
    every = {
        name: [one for file in ROOMS[name].members(REPOSITORY)
               for one in changes_of(REPOSITORY, file)]
        for name in rooms
    }  # fmt: skip
    total = sum(map(len, every.values()))
    return {
        name: random.Random(f"{seed} {name}").sample(
            changes, min(len(changes), max(1, round(size * len(changes) / total)))
        )
        for name, changes in every.items()
    }


class Kept:
    """Outcomes on disk, each good as long as the changed file stays as it is."""

    def __init__(self, path: Path, *, again: bool) -> None:
        self._path, self._again = path, again
        self._outcomes: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        self._tried: set[str] = set()

    def find(self, change: Change) -> str | None:
        """What came of a change; None where it is to be tried."""
        found = self._outcomes.get(_key(change))
        stale = self._again and found != "noticed" and change.id not in self._tried
        return None if stale else found

    def store(self, change: Change, outcome: str) -> None:
        """Keep an outcome at once."""
        self._tried.add(change.id)
        self._outcomes[_key(change)] = outcome
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._outcomes, indent=0))


def _key(change: Change) -> str:
    content = (REPOSITORY / change.file).read_bytes()
    return f"{change.id}-{hashlib.sha256(content).hexdigest()[:12]}"


def run(copy: Copy, room: Room, changes: list[Change], kept: Kept) -> None:
    """Try every change whose outcome is not known."""
    missing = [change for change in changes if kept.find(change) is None]
    lines: LinesByTest | None = None
    for number, change in enumerate(missing, 1):
        lines = lines or copy.lines_by_test(room)
        outcome = copy.try_change(change, lines)
        kept.store(change, outcome)
        print(f"{number}/{len(missing)} {outcome}: {change}", file=sys.stderr, flush=True)


def show(name: str, changes: list[Change], kept: Kept) -> bool:
    """Print a room's score and what nothing noticed; whether its target is reached."""
    outcomes = Counter(kept.find(change) for change in changes)
    # A test that never ends is a test that fails.
    noticed = outcomes["noticed"] + outcomes["too slow"]
    share, target = noticed / len(changes), ROOMS[name].target
    wanted = "" if target is None else f", target {target:.0%}"
    print(f"{name}: {noticed} of {len(changes)} changes noticed, {share:.0%}{wanted}")
    for change in changes:
        if kept.find(change) == "survived":
            print(f"  nothing noticed {change}")
    return target is None or share >= target


if __name__ == "__main__":
    raise SystemExit(main())
