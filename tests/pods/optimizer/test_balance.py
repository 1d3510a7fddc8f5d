"""Slow hosts, and work divided so that all finish together."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.errors import TPUValidationError
from tpukit.pods import balance_examples, find_stragglers


def test_the_slow_host_is_named():
    found = find_stragglers({"a": [1.0, 1.1, 0.9], "b": [1.0], "c": [2.0, 2.2, 2.1], "d": [1.0]})
    assert found
    assert found.slow == ("c",)
    assert found.skew == pytest.approx(2.1 / ((1 + 1 + 2.1 + 1) / 4))
    assert "c (2.1 s)" in found.__rich__()


def test_hosts_that_are_alike_are_no_stragglers():
    assert not find_stragglers({"a": [1.0], "b": [1.1]})
    with pytest.raises(TPUValidationError, match="at least one timed step"):
        find_stragglers({"a": []})


@settings(max_examples=150, deadline=None)
@given(
    times=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=3),
    examples=st.integers(3, 14),
)
def test_no_other_division_ends_earlier(times, examples):
    hosts = {f"h{n}": seconds for n, seconds in enumerate(times)}
    shares = balance_examples(hosts, examples)
    assert sum(shares.values()) == examples
    assert min(shares.values()) >= 1
    ends = max(shares[host] * hosts[host] for host in hosts)
    others = (
        division
        for division in itertools.product(range(1, examples + 1), repeat=len(times))
        if sum(division) == examples
    )
    best = min(max(n * t for n, t in zip(division, times, strict=True)) for division in others)
    assert ends == pytest.approx(best)


def test_what_hosts_have_now_counts():
    # b does half of a's work in the same time: it is half as fast.
    assert balance_examples({"a": 1.0, "b": 1.0}, 30, now={"a": 20, "b": 10}) == {"a": 20, "b": 10}


def test_impossible_divisions_are_refused():
    with pytest.raises(TPUValidationError, match="too few for 2 hosts"):
        balance_examples({"a": 1.0, "b": 1.0}, 1)
    with pytest.raises(TPUValidationError, match="above 0"):
        balance_examples({"a": 0.0}, 4)
