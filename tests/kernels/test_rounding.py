"""Rounding to narrow formats, against numpy, ml_dtypes and a search through every value."""

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 - numpy knows the formats by name
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tpukit.hardware.formats import BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2, INT4, INT8, parse_format
from tpukit.kernels.rounding import absmax_scales, decode, is_rounded_up, quantize, to_nearest

EIGHT_BITS = (INT8, INT4, FLOAT8_E4M3FN, FLOAT8_E5M2)
FEW = settings(max_examples=40, deadline=None)
# Whole ranges of magnitudes, none so small that a scale would not be a normal number.
magnitudes = st.floats(-(2.0**60), 2.0**60, width=32).map(lambda x: x if abs(x) > 1e-20 else 0.0)
matrices = hnp.arrays(np.float32, st.tuples(st.just(6), st.just(5)), elements=magnitudes)


def every_value(format):
    """All finite values of a format of at most 16 bits, in order."""
    if format.kind == "integer":
        return np.arange(-format.largest - 1, format.largest + 1, dtype=np.float64)
    width = {8: np.uint8, 16: np.uint16}[format.bits]
    with np.errstate(invalid="ignore"):
        values = np.arange(2**format.bits, dtype=width).view(format.name).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


@FEW
@given(st.sampled_from((*EIGHT_BITS, BFLOAT16, parse_format("float16"))), st.data())
def test_the_nearest_is_nearest_of_all(format, data):
    most = float(format.largest)
    x = data.draw(hnp.arrays(np.float32, 32, elements=st.floats(-most, most, width=32)))
    seen = np.asarray(to_nearest(jnp.asarray(x), format))
    assert seen.dtype == np.dtype(format.name)
    rounded = np.rint(x) if format.kind == "integer" else x
    np.testing.assert_array_equal(seen, rounded.astype(format.name))
    grid = every_value(format)
    least = np.abs(x[:, None].astype(np.float64) - grid).min(1)
    assert (np.abs(seen.astype(np.float64) - x) == least).all()


@FEW
@given(st.sampled_from(EIGHT_BITS), matrices, st.sampled_from([None, 0, 1, (0, 1), -1]))
def test_values_times_scales_are_near_and_reach_the_largest(format, x, axis):
    values, scales = quantize(jnp.asarray(x), format, axis=axis)
    largest = np.abs(x).max(axis=axis, keepdims=axis is not None)
    expected = np.where(largest > 0, largest / np.float32(format.largest), 1)
    np.testing.assert_allclose(scales, expected, rtol=1e-6)
    assert scales.dtype == jnp.float32
    assert scales.shape == expected.shape
    exact = np.asarray(values).astype(np.float64)
    reached = np.abs(exact).max(axis=axis, keepdims=axis is not None)
    np.testing.assert_array_equal(reached, np.where(largest > 0, format.largest, 0))
    np.testing.assert_array_equal(
        np.asarray(decode(values, scales)), exact.astype(np.float32) * np.asarray(scales)
    )
    if format.kind == "integer":
        step = np.broadcast_to(np.asarray(scales, np.float64), x.shape)
        assert (np.abs(exact * step - x) <= step * (0.5 + 1e-4)).all()


def test_nothing_has_a_scale_that_can_be_divided_by():
    zeros = jnp.zeros((3, 4))
    np.testing.assert_array_equal(absmax_scales(zeros, INT8, axis=1), np.ones((3, 1)))
    np.testing.assert_array_equal(absmax_scales(zeros, INT8, axis=1, of_zeros=0), np.zeros((3, 1)))
    assert absmax_scales(zeros[:0], INT8) == 1
    values, scales = quantize(zeros, FLOAT8_E4M3FN)
    assert not np.asarray(decode(values, scales)).any()


@pytest.mark.parametrize("format", [INT8, FLOAT8_E4M3FN], ids=str)
def test_what_is_not_a_number_is_still_seen(format):
    x = jnp.asarray([[1.0, jnp.nan], [1.0, 2.0]])
    seen = np.asarray(decode(*quantize(x, format, axis=1)))
    assert np.isnan(seen[0]).any()
    np.testing.assert_allclose(seen[1], [1.0, 2.0], rtol=0.07)


def test_wide_input_keeps_its_width_until_it_is_rounded():
    with jax.enable_x64(True):
        x = jnp.asarray([1.0, 126.5 / 127 + 1e-12, 126.5 / 127 - 1e-12], jnp.float64)
        values, scales = quantize(x, INT8)
    assert scales.dtype == jnp.float32
    np.testing.assert_array_equal(values, [127, 127, 126])


@FEW
@given(st.floats(-1000, 1000), st.floats(0.001, 1000), st.floats(0, 1))
def test_stochastic_rounding_is_right_on_average(lower, gap, share):
    thresholds = (jnp.arange(1000) + 0.5) / 1000
    x = jnp.float32(lower) + jnp.float32(gap) * jnp.float32(share)
    up = is_rounded_up(x, jnp.float32(lower), jnp.float32(lower) + jnp.float32(gap), thresholds)
    mean = float(jnp.where(up, lower + gap, lower).mean())
    assert mean == pytest.approx(float(x), abs=1e-3 * gap + 1e-6 * (abs(lower) + gap) + 1e-4)
