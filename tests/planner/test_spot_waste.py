"""Preemption: the interval is where waste is least, and waste is what a simulated run loses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import ConfigError
from tpukit.planner.cost.money import SECONDS_PER_DAY, Preemption, _most

SPOT = Preemption(per_slice_day=4.0, recovery_s=600.0, source="a test")


def simulated_progress(spot, interval_s, save_s, write_s=0.0, *, lives=400_000):
    """Share of the time kept, by playing one life of a slice after another.

    A life ends at a random moment; what was written before it is kept, and a recovery follows.
    """
    mean_up = SECONDS_PER_DAY / spot.per_slice_day - spot.recovery_s
    lifetimes = np.random.default_rng(0).exponential(mean_up, lives)
    saved = np.floor(np.maximum(lifetimes - write_s, 0) / (interval_s + save_s)) * interval_s
    return saved.sum() / (lifetimes + spot.recovery_s).sum()


@pytest.mark.parametrize("per_day", [0.5, 4.0, 40.0, 110.0])
@pytest.mark.parametrize("save_s", [1.0, 10.0, 60.0])
def test_a_simulated_run_keeps_as_much_and_no_other_interval_keeps_more(per_day, save_s):
    spot = Preemption(per_slice_day=per_day, recovery_s=600.0)
    best = float(spot.interval_s(save_s, 1))
    kept = simulated_progress(spot, best, save_s)
    assert float(spot.progress(save_s, 1)) == pytest.approx(kept, rel=0.02)
    for other in (best / 3, best * 3):
        assert simulated_progress(spot, other, save_s) < kept


@pytest.mark.parametrize("per_day", [1.7, 12.0, 60.0])
@pytest.mark.parametrize("write_s", [7.0, 120.0, 600.0])
def test_work_that_is_not_in_the_store_yet_is_lost(per_day, write_s):
    spot = Preemption(per_slice_day=per_day, recovery_s=600.0)
    interval = float(spot.interval_s(0.05, 1, write_s=write_s))
    kept = simulated_progress(spot, interval, 0.05, write_s)
    assert float(spot.progress(0.05, 1, write_s=write_s)) == pytest.approx(kept, rel=0.03)
    assert interval >= write_s  # a save waits for the one before it


def test_saves_are_minutes_apart_and_not_seconds():
    spot, saved = Preemption(), 38e9
    write_s = float(spot.write_s(saved))
    assert write_s == pytest.approx(38e9 / (200e9 / 38))  # 7.2 s
    assert 10 * 60 < float(spot.interval_s(0.003, 1, write_s=write_s)) < 20 * 60
    # What the longer interval gives away is little.
    extra = spot.waste(0.003, 1, write_s=write_s) - spot.waste(0.003, 1)
    assert 0 < float(extra) < 0.01
    faster = Preemption(store_bytes_per_s=50e9)
    slow, quick = (
        float(one.interval_s(0.0, 1, write_s=one.write_s(saved))) for one in (spot, faster)
    )
    assert slow / quick == pytest.approx((50e9 / (200e9 / 38)) ** 0.5, rel=0.02)


def test_saves_come_after_whole_steps():
    step = 10 * float(SPOT.interval_s(5.0, 1))
    assert float(SPOT.interval_s(5.0, 1, step_s=step)) == step
    kept = simulated_progress(SPOT, step, 5.0)
    assert float(SPOT.progress(5.0, 1, step_s=step)) == pytest.approx(kept, rel=0.02)


@given(
    per_day=st.floats(0, 1000),
    recovery_s=st.floats(0, 10_000),
    save_s=st.floats(0, 1000),
    write_s=st.floats(0, 1000),
    slices=st.integers(1, 64),
    more=st.floats(1, 4),
)
def test_waste_is_a_share_and_never_falls_when_anything_gets_worse(
    per_day, recovery_s, save_s, write_s, slices, more
):
    def waste(save_s=save_s, slices=slices, step_s=0.0, write_s=write_s, **changed):
        spot = Preemption(**{"per_slice_day": per_day, "recovery_s": recovery_s, **changed})
        return float(spot.waste(save_s, slices, step_s=step_s, write_s=write_s))

    usual = waste()
    assert 0 <= usual <= 1
    slack = 1e-9
    assert waste(per_slice_day=min(1440, more * per_day)) >= usual - slack
    assert waste(recovery_s=more * recovery_s) >= usual - slack
    assert waste(save_s=more * save_s) >= usual - slack
    assert waste(write_s=more * write_s) >= usual - slack
    assert waste(slices=2 * slices) >= usual - slack
    assert waste(step_s=100.0) >= usual - slack


def test_what_never_finishes_says_what_would():
    lost = Preemption(per_slice_day=200.0)
    assert float(lost.waste(10.0, 1)) == 1.0
    words = lost.why_never(10.0, 1, step_s=0.0)
    assert "200 preemptions a day" in words
    assert "no checkpoint interval makes progress" in words
    rate = float(words.partition("would count with ")[2].split()[0])
    within = float(words.partition("back within ")[2].split()[0])
    fewer = Preemption(per_slice_day=rate)
    sooner = Preemption(per_slice_day=200.0, recovery_s=60 * within)
    for spot in (fewer, sooner):
        assert float(spot.progress(10.0, 1)) == pytest.approx(0.5, abs=0.02)
    hopeless = Preemption(per_slice_day=1440.0, recovery_s=10.0).why_never(300.0, 2, step_s=0.0)
    assert "no recovery is short enough, each save takes 300 s" in hopeless


def test_without_preemptions_nothing_is_wasted():
    assert float(Preemption(per_slice_day=0.0).waste(100.0, 8)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("given_by_user", "words"),
    [
        ({"per_slice_day": -3}, "accepted are 0 to 1,440 of a slice"),
        ({"per_slice_day": float("nan")}, "preemptions per day is nan"),
        ({"recovery_s": -1}, "accepted are 0 to 86,400 seconds"),
        ({"store_bytes_per_s": 0}, "store_bytes_per_s is 0; accepted are"),
    ],
)
def test_numbers_have_ranges(given_by_user, words):
    with pytest.raises(ConfigError, match=words):
        Preemption(**given_by_user)


def test_usual_preemptions_are_those_of_the_record():
    usual = Preemption()  # seven jobs, 42 recoveries in three to four days, 8.0 h lost together
    assert 7 * 3.5 * usual.per_slice_day == pytest.approx(42)
    assert 42 * usual.recovery_s == pytest.approx(8.0 * 3600)


def test_recoveries_that_fill_the_day_leave_nothing():
    full = Preemption(per_slice_day=144.0, recovery_s=600.0)
    assert full.up_s(1) == 0.0
    assert float(full.progress(0.0, 1)) == 0.0
    assert Preemption(per_slice_day=72.0, recovery_s=600.0).up_s(2) == 0.0
    assert Preemption(per_slice_day=36.0, recovery_s=600.0).up_s(2) == 600.0


@pytest.mark.parametrize(("per_day", "never"), [(142.5, False), (142.6, True)])
def test_less_than_a_hundredth_of_the_time_is_no_progress(per_day, never):
    spot = Preemption(per_slice_day=per_day, recovery_s=600.0)
    kept = (SECONDS_PER_DAY / per_day - 600.0) * per_day / SECONDS_PER_DAY
    assert (kept < 0.01) == never
    assert float(spot.waste(0.0, 1)) == pytest.approx(1.0 if never else 1 - kept, abs=1e-4)


@pytest.mark.parametrize("save_s", [0.5, 30.0, 400.0])
def test_no_interval_near_the_best_is_better(save_s):
    up = SECONDS_PER_DAY / 4 - 600.0
    best = float(SPOT.interval_s(save_s, 1))

    def kept(interval):
        return interval / np.expm1((interval + save_s) / up)

    assert all(kept(best) > kept(best * near) for near in (0.999, 1.001))
    assert float(SPOT.progress(save_s, 1)) == pytest.approx(kept(best) / (up + 600.0), rel=1e-9)


def test_several_slices_are_lost_as_often_as_all_of_them():
    four = Preemption(per_slice_day=1.0, recovery_s=600.0)
    assert float(four.waste(10.0, 4)) == pytest.approx(float(SPOT.waste(10.0, 1)))
    assert "each of 2 slices" in Preemption(per_slice_day=300.0).why_never(1.0, 2, step_s=0.0)
    assert "of a slice and" in Preemption(per_slice_day=300.0).why_never(1.0, 1, step_s=0.0)


def test_a_save_of_no_time_counts_as_a_microsecond_and_no_preemption_as_one_in_1e12_days():
    often = Preemption(per_slice_day=1440.0, recovery_s=0.0)  # up for a minute
    young = (2 * 1e-6 * 60.0) ** 0.5
    assert float(often.interval_s(0.0, 1)) == pytest.approx(young, rel=1e-3)
    # Half of an interval is done again, and as much is spent on saves.
    assert float(often.progress(0.0, 1)) == pytest.approx(1 - young / 60, abs=1e-6)
    assert float(often.waste(0.0, 1)) == pytest.approx(young / 60, rel=1e-3)
    assert Preemption(per_slice_day=0.0).up_s(1) == pytest.approx(SECONDS_PER_DAY * 1e12)


@pytest.mark.parametrize("most", [0.0, 0.03, 5.0, 8.0])
def test_the_most_that_does_is_found_by_halves(most):
    assert _most(lambda number: number <= most, 8.0) == pytest.approx(most, abs=1e-9)
