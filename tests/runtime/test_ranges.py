"""Ranges hold what they say, and nothing that is no number."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import ConfigError
from tpukit.runtime import ranges
from tpukit.runtime.ranges import COUNT, SEED, SHARE, Range

EVERY = [one for one in vars(ranges).values() if isinstance(one, Range)]


@given(st.sampled_from(EVERY), st.one_of(st.integers(), st.floats()))
def test_what_is_inside_is_finite_and_between_the_ends(accepted, number):
    inside = number in accepted
    assert inside == (
        not (isinstance(number, float) and not math.isfinite(number))
        and accepted.low <= number <= accepted.high
        and (number != accepted.low or not accepted.above)
    )


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e30, -1, 10**400])
@pytest.mark.parametrize("accepted", EVERY)
def test_odd_numbers_are_in_none(accepted, number):
    assert number not in accepted


def test_a_refusal_says_what_was_seen_and_what_is_accepted():
    with pytest.raises(ConfigError, match=r"--batch is 0; accepted are 1 to 2,147,483,647\."):
        COUNT.check("--batch", 0)
    with pytest.raises(ConfigError, match=r"is nan; accepted are above 0 to 1\."):
        SHARE.check("top_p", math.nan)
    SEED.check("--seed", 0)
