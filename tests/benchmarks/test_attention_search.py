"""The search for others' blocks: it ends where no step gains, and says when it was cut short."""

import pytest

pytest.importorskip("tokamax", reason="a dependency of benchmarks alone")

from attention_rivals import (
    Case,
    Family,
    Kept,
    Sizes,
    Timing,
    around,
    fastest,
    identity_of,
    search,
)
from harness import DATA

CASE = Case(4096)
START = Sizes(1024, 1024, 512)
FAMILY = Family("other", lambda *_: None, (START,), has_scheduler=True)


def timer(family, sizes):
    """Fastest with tiles of 256 keys and blocks of 2048 queries."""
    return Timing(100 + abs(sizes.compute - 256) / 4 + abs(sizes.q - 2048) / 8, 0)


def test_it_climbs_until_no_step_gains():
    searched = search({FAMILY: [START]}, CASE, timer, rounds=None)
    assert searched.to_the_end
    assert fastest(searched.found, "other") == (Sizes(2048, 1024, 256), 100)


def test_a_budget_takes_what_gained_elsewhere_first_and_says_it_was_cut_short():
    searched = search({FAMILY: [START]}, CASE, timer, rounds=None, budget=2)
    assert not searched.to_the_end
    tried = [sizes for _, sizes in searched.found]
    assert tried == [START, Sizes(1024, 1024, 512, True), Sizes(1024, 1024, 256)]
    assert not search({FAMILY: [START]}, CASE, timer, rounds=0).to_the_end


def test_steps_stay_within_the_sequence_and_the_largest_tile():
    largest = list(around(FAMILY, Sizes(4096, 4096, 512), CASE))
    assert all(max(sizes.q, sizes.kv) <= 4096 for sizes in largest)
    assert Sizes(4096, 4096, 1024) not in largest


def test_kept_times_are_those_of_the_programs_as_they_are():
    kept = Kept(DATA / "attention_static.json")
    for chip in ("v5e", "v5p", "v6e", "7x"):
        for direction in ("forward", "backward"):
            identity = identity_of(chip, direction)
            assert list(kept.labels(f"{chip} causal_4096 {direction} ", identity)), (
                chip,
                direction,
            )
