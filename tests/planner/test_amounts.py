"""Durations, counts and dollars as people write them."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import ConfigError
from tpukit.planner.amounts import count_text, days_text, parse_days, parse_tokens, parse_usd


@pytest.mark.parametrize(
    ("text", "days"),
    [("30d", 30), ("12h", 0.5), ("2w", 14), ("90 min", 0.0625), (7, 7), ("1.5 days", 1.5)],
)
def test_durations(text, days):
    assert parse_days(text) == pytest.approx(days)
    assert parse_days(timedelta(days=days)) == pytest.approx(days)


@pytest.mark.parametrize(
    ("text", "count"), [("15e12", 15e12), ("15T", 15e12), ("300B", 3e11), (10**12, 1e12)]
)
def test_tokens(text, count):
    assert parse_tokens(text) == count


@pytest.mark.parametrize(("text", "usd"), [("$50,000", 50_000), ("50k", 50_000), (12.5, 12.5)])
def test_dollars(text, usd):
    assert parse_usd(text) == usd


@pytest.mark.parametrize(
    "wrong", ["", "soon", "-3d", "0d", "3 fortnights", True, None, "1e999", []]
)
def test_a_wrong_duration_says_how_to_write_one(wrong):
    with pytest.raises(ConfigError, match="write 30d, 12h or 2w"):
        parse_days(wrong)


def test_a_wrong_count_or_amount_says_how_to_write_one():
    with pytest.raises(ConfigError, match="15e12, 15T or 300B"):
        parse_tokens("15Q")
    with pytest.raises(ConfigError, match=r"\$50,000 or 50k"):
        parse_usd("fifty")


def test_amounts_are_told_as_people_write_them():
    assert [days_text(days) for days in (30, 0.5, 4233.3)] == ["30 days", "12 h", "4,233 days"]
    assert [days_text(seconds / 86_400) for seconds in (7.74, 90)] == ["7.74 s", "1.5 min"]
    assert [count_text(count) for count in (15e12, 1.5e9, 800)] == ["15T", "1.5B", "800"]


@given(st.floats(1e-3, 1e15), st.sampled_from(["", "k", "m", "b", "t"]))
def test_what_python_writes_is_read_or_refused_by_its_range(number, unit):
    count = number * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[unit]
    text = f"{number!r}{unit}"
    if 1 <= count <= 1e17:
        assert parse_tokens(text) == pytest.approx(count)
    else:
        with pytest.raises(ConfigError, match=r"accepted are 1 to 1e\+17"):
            parse_tokens(text)
