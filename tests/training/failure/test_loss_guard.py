"""The loss guard on synthetic curves: it finds what is bad, and leaves noise alone."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.errors import ConfigError
from tpukit.training.failure import LossGuard


def curve(seed, *, steps=600, noise=0.05):
    """A loss that falls as a power law, with the noise of small batches."""
    steps = np.arange(1, steps + 1)
    random = np.random.default_rng(seed)
    return 2.0 + 8.0 * steps**-0.4 + random.normal(0, noise, len(steps))


def actions(guard, losses, first=0):
    return [guard.observe(first + index, float(loss)).action for index, loss in enumerate(losses)]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3])
def test_healthy_curves_raise_no_alarm(noise):
    for seed in range(30):
        assert set(actions(LossGuard(), curve(seed, noise=noise))) == {"continue"}


@pytest.mark.parametrize("policy", ["rollback", "skip", "stop"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_bad_from_the_first_step(policy, bad):
    decision = LossGuard(policy).observe(0, bad)
    assert decision.action == policy
    assert decision.is_bad
    assert str(bad) in decision.reason


def test_a_gradient_norm_that_is_no_number_is_bad():
    decision = LossGuard().observe(3, 2.0, math.nan)
    assert decision.action == "rollback"
    assert "gradient norm" in decision.reason
    assert LossGuard().observe(3, 2.0, 1e9).action == "continue"


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), at=st.integers(100, 500), height=st.floats(2.0, 1e6))
def test_a_spike_is_found_wherever_it_is(seed, at, height):
    losses = curve(seed)
    losses[at] += height
    found = actions(LossGuard("skip"), losses)
    assert found[at] == "skip"
    assert found.count("skip") == 1


def test_outliers_do_not_move_what_they_are_measured_by():
    """A mean and standard deviation over losses with three such outliers would hide the spike."""
    losses = curve(1, noise=0.02)[200:]
    losses[[3, 8, 13]] += 30.0
    spike = losses[20] + 2.0
    seen = losses[:16]
    assert spike < np.mean(seen) + 10 * np.std(seen)
    guard = LossGuard("skip")
    assert set(actions(guard, losses[:20])) == {"continue"}
    assert guard.observe(20, spike).action == "skip"


def test_without_a_factor_only_numbers_count():
    losses = curve(2)
    losses[300] = 1e9
    assert set(actions(LossGuard(spike_factor=None), losses)) == {"continue"}


def test_rollbacks_that_do_not_help_end_the_run():
    guard = LossGuard(max_interventions=2)
    actions(guard, curve(3)[:100])
    assert [guard.observe(100, math.nan).action for _ in range(3)] == ["rollback"] * 2 + ["stop"]


def test_a_window_of_good_steps_forgives():
    guard = LossGuard(window=32, max_interventions=1)
    losses = curve(4)
    for start in (0, 100, 200, 300):
        assert set(actions(guard, losses[start : start + 99], start)) == {"continue"}
        assert guard.observe(start + 99, math.nan).action == "rollback"


def test_steps_taken_again_replace_what_followed_them():
    """After a rollback the abandoned path must not count, or it would justify the next spike."""
    guard = LossGuard()
    actions(guard, curve(5)[:200])
    creeping = [2.6 + 0.004 * index for index in range(100)]
    actions(guard, creeping, first=200)
    again = LossGuard()
    actions(again, curve(5)[:200])
    assert guard.observe(200, 4.0).action == again.observe(200, 4.0).action == "rollback"


def test_restored_guard_decides_as_the_one_that_went_on():
    losses = curve(6)
    losses[250] += 5
    losses[280] = math.nan
    whole, before = LossGuard("skip"), LossGuard("skip")
    expected = actions(whole, losses)
    first = actions(before, losses[:251])
    after = LossGuard("skip")
    after.restore(json.loads(json.dumps(before.state())))
    assert first + actions(after, losses[251:], first=251) == expected
    assert after.state() == whole.state()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "rolback"}, "Did you mean 'rollback'"),
        ({"spike_factor": 0}, "above 0"),
        ({"window": 3}, "at least 16"),
        ({"max_interventions": -1}, "0 or more"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        LossGuard(**arguments)
