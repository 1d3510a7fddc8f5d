"""The state of a rule against a reference that looks at the whole history each time."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.errors import TPUValidationError
from tpukit.hardware.missing import Missing
from tpukit.observe.alerts.rule import AlertRule, RuleState

GONE = Missing("server gone")


def reference(history, *, above, threshold, clear, for_s, cool_down_s):
    """Which readings are told, by definition and without a state.

    A reading fires if some stretch of readings out of bounds, with nothing else in between, lasted
    `for_s` before or at it, and no reading since that stretch was within `clear`.
    """

    def out(value):
        return value is not None and (value > threshold if above else value < threshold)

    def within(value):
        return value is not None and (value <= clear if above else value >= clear)

    def fires_from(last):
        """Whether the stretch of readings out of bounds that ends at `last` lasted long enough."""
        first = last
        while first > 0 and out(history[first - 1][1]):
            first -= 1
        lasted = history[last][0] - history[first][0]
        return out(history[last][1]) and lasted >= for_s

    def fires(index):
        for last in range(index, -1, -1):
            if within(history[last][1]):
                return False
            if fires_from(last):
                return True
        return False

    told, told_at = [], -math.inf
    for index, (now, value) in enumerate(history):
        began = index
        while began > 0 and fires(began - 1) and fires(began):
            began -= 1
        already = any(began <= earlier for earlier in told)
        if fires(index) and out(value) and not already and now - told_at >= cool_down_s:
            told.append(index)
            told_at = now
    return told, [fires(index) for index in range(len(history))]


HISTORIES = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.none() | st.integers(0, 10)), max_size=25
)


@settings(max_examples=400, deadline=None)
@given(
    HISTORIES,
    st.booleans(),
    st.integers(3, 7),
    st.integers(0, 3),
    st.sampled_from([0.0, 1.0, 2.5]),
    st.sampled_from([0.0, 2.0, 6.0]),
)
def test_it_agrees_with_the_reference(steps, above, threshold, gap, for_s, cool_down_s):
    clear = threshold - gap if above else threshold + gap
    now, history = 100.0, []
    for passed, value in steps:
        now += passed
        history.append((now, value))
    rule = AlertRule(
        metric="x",
        condition=">" if above else "<",
        threshold=threshold,
        clear=clear,
        for_s=for_s,
        cool_down_s=cool_down_s,
    )
    state, told, firing = RuleState(rule), [], []
    for index, (at, value) in enumerate(history):
        if state.observe(GONE if value is None else value, at):
            told.append(index)
        firing.append(state.is_firing)
    wanted = reference(
        history,
        above=above,
        threshold=threshold,
        clear=clear,
        for_s=for_s,
        cool_down_s=cool_down_s,
    )
    assert (told, firing) == wanted


def observe(rule, *values, every=1.0):
    state = RuleState(rule)
    return [state.observe(value, index * every) for index, value in enumerate(values)]


def test_it_fires_once_at_once_by_default():
    rule = AlertRule(metric="utilization", condition="<", threshold=0.7)
    assert observe(rule, 0.9, 0.6, 0.5, 0.6) == [False, True, False, False]


def test_it_waits_for_its_duration():
    rule = AlertRule(metric="x", condition=">", threshold=1, for_s=2)
    assert observe(rule, 2, 2, 2, 2) == [False, False, True, False]
    assert observe(rule, 2, 2, 0, 2, 2) == [False] * 5
    assert observe(rule, 2, 2, GONE, 2, 2) == [False] * 5, "a missing value is no proof"


def test_a_value_at_the_edge_fires_once_with_hysteresis():
    edge = (10.1, 9.9, 10.1, 9.9, 10.1, 8.0, 10.1)
    plain = AlertRule(metric="x", condition=">", threshold=10, cool_down_s=0)
    assert observe(plain, *edge).count(True) == 4
    damped = AlertRule(metric="x", condition=">", threshold=10, clear=9, cool_down_s=0)
    assert observe(damped, *edge) == [True, False, False, False, False, False, True]


def test_cool_down_delays_and_does_not_lose():
    rule = AlertRule(metric="x", condition=">", threshold=1, cool_down_s=3)
    assert observe(rule, 2, 0, 2, 2, 2) == [True, False, False, True, False]


@pytest.mark.parametrize("condition", ["<", "<=", ">", ">="])
def test_missing_never_fires(condition):
    rule = AlertRule(metric="x", condition=condition, threshold=0)
    assert observe(rule, GONE, GONE) == [False, False]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"condition": "=="}, "is no comparison; give one of <, <=, >, >="),
        ({"clear": 2.0}, "would never end; give at most 1"),
        ({"condition": "<", "clear": 0.5}, "give at least 1"),
        ({"for_s": -1}, "0 or more seconds"),
    ],
)
def test_rules_that_make_no_sense_are_refused(given, says):
    with pytest.raises(TPUValidationError, match=says):
        AlertRule(**{"metric": "x", "condition": ">", "threshold": 1.0, **given})
