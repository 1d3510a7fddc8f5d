"""A figure always says where it came from, or why it is missing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import TPUNotAvailableError, TPUValidationError
from tpukit.hardware import Figure
from tpukit.hardware.figure import format_quantity


def test_a_value_needs_an_origin_and_a_source():
    with pytest.raises(TPUValidationError, match=r"origin None.*expected one of measured"):
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
