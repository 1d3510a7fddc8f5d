"""A figure always says where it came from, or why it is missing."""

import functools
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import TPUNotAvailableError, TPUValidationError
from tpukit.hardware import Figure
from tpukit.hardware.figure import ORIGINS, format_quantity


def test_a_value_needs_an_origin_and_a_source():
    with pytest.raises(TPUValidationError, match=r"origin None.*expected one of datasheet"):
        Figure(3.0, "GB/s")
    with pytest.raises(TPUValidationError, match="source ''"):
        Figure(3.0, "GB/s", "measured")
    with pytest.raises(TPUValidationError, match="origin 'guess'"):
        Figure(3.0, "GB/s", "guess", "somewhere")  # pyright: ignore[reportArgumentType]


def test_no_value_needs_a_reason():
    with pytest.raises(TPUValidationError, match="needs a reason"):
        Figure(None, "GB/s")
    missing = Figure.missing("GB/s", "nobody published it.")
    assert str(missing) == "– (nobody published it.)"
    assert missing.scaled(4).value is None
    with pytest.raises(TPUNotAvailableError, match=r"The roofline needs.*nobody published it"):
        missing.require("The roofline")


def test_scaling_keeps_the_provenance():
    one = Figure(918, "TFLOP/s", "datasheet", "a page", "2026-11-15", note="another says 920.")
    many = one.scaled(64)
    assert (many.value, many.origin, many.source, many.note) == (
        58_752,
        one.origin,
        one.source,
        one.note,
    )
    assert many.require("anything") == 58_752
    assert many.to_dict()["note"] == "another says 920."
    assert str(many) == "58,752 TFLOP/s (datasheet)"


def figure(value, origin, unit="s", **rest):
    return Figure(value, unit, origin, rest.pop("source", f"a {origin}"), **rest)


@given(st.lists(st.sampled_from(list(ORIGINS)), min_size=2, max_size=5), st.randoms())
def test_what_is_derived_is_as_sure_as_the_least_sure_of_its_parts(origins, dice):
    parts = [figure(2.0, origin) for origin in origins]
    least = max(origins, key=list(ORIGINS).index)
    product, total = (functools.reduce(by, parts) for by in (operator.mul, operator.add))
    assert (product.value, total.value) == (2.0 ** len(parts), 2.0 * len(parts))
    assert product.origin == total.origin == (parts[0] / product).origin == least
    shuffled = dice.sample(parts, len(parts))
    assert functools.reduce(operator.mul, shuffled).origin == least
    assert set(product.source.split("; ")) == {f"a {origin}" for origin in origins}


def test_a_modelled_time_at_a_listed_price_is_a_model():
    hours = figure(10.0, "model", "chip-h")
    cost = hours * figure(4.2, "third-party", "USD/chip-h", date="2026-08-21")
    assert (cost.value, cost.unit, cost.origin) == (42.0, "USD", "model")
    assert cost.source == "a model; a third-party"
    assert cost.date == "2026-08-21"
    rate = figure(100.0, "measured", "tokens") / figure(2.0, "datasheet", "s")
    assert (rate.value, rate.unit, rate.origin) == (50.0, "tokens/s", "measured")
    assert (rate / rate).unit == ""
    assert (3 * hours).value == (hours * 3).value == (hours / (1 / 3)).value == 30.0


def test_a_missing_part_leaves_the_whole_missing_with_its_reason():
    price = Figure.missing("USD/chip-h", "no public list price.")
    hours = figure(10.0, "model", "chip-h")
    for whole in (hours * price, price * hours, price / hours, price + price):
        assert (whole.value, whole.reason) == (None, "no public list price.")
    with pytest.raises(TPUValidationError, match="'chip-h' and 's' cannot be added"):
        hours + figure(1.0, "model")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (32 * 2**30, "B", "32 GiB"),
        (31.25 * 2**30, "B", "31.25 GiB"),
        (0, "B", "0 B"),
        (16 * 1024, "B", "16 KiB"),
        (7 * 2**60, "B", "7,168 PiB"),
        (2765, "GB/s", "2,765 GB/s"),
        (3.125, "GB/s", "3.125 GB/s"),
        (0.2673, "USD/chip-h", "0.2673 USD/chip-h"),
        (256, "", "256"),
        (1000, "GB/s", "1,000 GB/s"),
    ],
)
def test_quantities_read_well(value, unit, text):
    assert format_quantity(value, unit) == text


@given(st.floats(1, 1e15))
def test_text_of_bytes_is_within_a_thousandth(value):
    number, unit = format_quantity(value, "B").replace(",", "").split()
    power = ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit)
    assert float(number) * 1024**power == pytest.approx(value, rel=1e-3)
