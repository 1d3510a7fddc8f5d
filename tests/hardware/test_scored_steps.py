"""The shipped scoring against the published rows, and its band against a count by hand."""

import json
from pathlib import Path

import pytest

from tpukit.hardware.rates import Band, ScoredStep, ScoredSteps

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "data" / "published_results.json"


def step(ratio, source="a"):
    """A step that took `ratio` of its prediction."""
    return ScoredStep("step", source, "v6e", ratio, 1.0, 1.0)


def test_the_band_leaves_a_twentieth_out_on_each_side():
    # Of 39 steps two are beyond on each side by rank; the band runs to the second of them.
    ratios = [0.80, 0.915, *(1.0 for _ in range(35)), 1.052, 1.30]
    assert Band.around([step(ratio) for ratio in ratios]) == Band(below=0.09, above=0.06)


def test_few_steps_are_all_inside():
    assert Band.around([step(0.9), step(1.25)]) == Band(below=0.1, above=0.25)


def test_coverage_is_counted_in_a_band_that_does_not_know_the_source():
    steps = [step(0.95), step(1.05), step(1.20, "b"), step(1.0, "b")]
    scored = ScoredSteps("", tuple(steps))
    # The band of "a" is 5 % each way and holds one of "b"; that of "b" is 0 to 20 % and one of "a".
    assert scored.covered == 2
    assert scored.coverage_text.startswith("2 of 4 published steps")


def test_a_step_that_is_left_out_does_not_count():
    scored = ScoredSteps("", (step(1.0), ScoredStep("x", "b", "v6e", 9, 1, 1, "too large")))
    assert len(scored.counted) == 1
    assert ScoredSteps.from_dict(json.loads(json.dumps(scored.to_dict()))) == scored


def test_a_later_scoring_of_some_rows_leaves_the_others():
    def scored(name, time, day):
        return ScoredStep(name, "a", "v6e", 1.0, time, time, date=day)

    first = ScoredSteps("old", (scored("x", 1.1, "2026-01-01"), scored("y", 1.2, "2026-01-01")))
    again = ScoredSteps("new", (scored("y", 1.0, "2026-02-01"), scored("z", 1.3, "2026-02-01")))
    joined = first.updated_by(again)
    assert [(one.name, one.predicted_s) for one in joined.steps] == [
        ("x", 1.1),
        ("y", 1.0),
        ("z", 1.3),
    ]
    assert (joined.date, joined.steps[0].date) == ("2026-02-01", "2026-01-01")


def test_every_shipped_row_is_a_published_one():
    rows = {row["id"]: row for row in json.loads(PUBLISHED.read_text())["results"]}
    shipped = ScoredSteps.shipped()
    assert shipped.date
    assert len(shipped.counted) >= 41
    for one in shipped.steps:
        row = rows[one.name]
        assert row["source"].startswith(one.source)
        assert row["hardware"]["gen"].removeprefix("tpu") == one.chip
        if row["measured"]["step_time_s"]:
            assert one.published_s == pytest.approx(row["measured"]["step_time_s"], rel=1e-3)


def test_the_shipped_band_is_about_what_its_rule_promises():
    """Nine of ten; a band that is too sure of itself would show here."""
    shipped = ScoredSteps.shipped()
    assert shipped.covered / len(shipped.counted) > 0.85
    assert 0 < shipped.band.below < 0.2
    assert 0 < shipped.band.above < 0.2
