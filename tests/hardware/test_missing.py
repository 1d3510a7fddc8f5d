"""A missing figure prints as a dash, crosses no threshold, and says why it is missing."""

import json
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import TPUNotAvailableError
from tpukit.hardware.missing import Missing, plain

GONE = Missing("no driver")
SPECS = ["", ".1%", ".1f", ",.4g", ">10", "d", "e", "+09.3f", "s"]


@pytest.mark.parametrize("spec", SPECS)
def test_it_is_a_dash_under_any_format_spec(spec):
    assert format(GONE, spec) == "–"


def test_it_is_a_dash_in_text_of_every_kind():
    assert str(GONE) == "–"
    assert f"{GONE:.1%} of {GONE!s} at {GONE:.1f}GB" == "– of – at –GB"
    assert "{:>8.2f}".format(GONE) == "–"  # noqa: UP032 - this spelling too
    assert repr(GONE) == "Missing('no driver')"


@given(st.floats() | st.integers())
def test_no_number_is_above_below_or_equal(number):
    for compares in (operator.lt, operator.le, operator.gt, operator.ge):
        assert compares(GONE, number) is False
        assert compares(number, GONE) is False
    assert number != GONE
    assert GONE not in [number]


@given(st.floats(allow_nan=False))
def test_arithmetic_keeps_the_reason(number):
    for result in (GONE * number, number * GONE, GONE / number, number / GONE):
        assert result == GONE
    for result in (GONE + number, number + GONE, GONE - number, number - GONE):
        assert result.reason == "no driver"


def test_it_is_falsy_and_equal_to_its_like():
    assert not GONE
    assert Missing("no driver") == GONE
    assert Missing("another") != GONE
    assert len({GONE, Missing("no driver"), Missing("another")}) == 2


@pytest.mark.parametrize("asked", [float, int])
def test_the_number_itself_is_an_error_with_the_reason(asked):
    with pytest.raises(TPUNotAvailableError, match="no driver"):
        asked(GONE)


def test_json_has_null_for_it():
    assert json.dumps({"a": GONE.to_dict(), "b": plain(GONE), "c": plain(0.5)}) == (
        '{"a": null, "b": null, "c": 0.5}'
    )
