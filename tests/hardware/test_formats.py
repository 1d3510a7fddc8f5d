"""The table of number formats, against ml_dtypes, jax and the compiler."""

import itertools
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax_names import tpu_info

from tpukit.errors import TPUValidationError
from tpukit.hardware import get_chip, parse_format
from tpukit.hardware.catalog import generation_names
from tpukit.hardware.formats import FORMATS, PEAKS, spelled_as

any_format = st.sampled_from(FORMATS)


def limits(one):
    """Bits and largest value by those who define them."""
    if one.kind == "boolean":
        return 8, 1
    if one.kind in ("integer", "unsigned"):
        return ml_dtypes.iinfo(one.name).bits, int(ml_dtypes.iinfo(one.name).max)
    found = ml_dtypes.finfo(one.name) if one.kind == "float" else np.finfo(one.name)
    return found.bits * (2 if one.kind == "complex" else 1), float(found.max)


@pytest.mark.parametrize("one", FORMATS, ids=str)
def test_bits_and_largest_value_are_those_of_ml_dtypes(one):
    assert (one.bits, one.largest) == limits(one)
    assert one.itemsize == np.dtype(one.name).itemsize


@pytest.mark.parametrize("one", FORMATS, ids=str)
def test_the_compiler_prints_the_name_it_is_said_to(one):
    with jax.enable_x64(True):
        lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((3,), one.name))
    assert f"({one.hlo}[3]" in lowered.compiler_ir("hlo").as_hlo_text()


@given(any_format, st.integers(0, 10_000))
def test_stored_values_are_packed(one, count):
    assert one.nbytes(count) == int(np.ceil(count * one.bits / 8))
    if one.bits >= 8:
        assert one.nbytes(count) == np.empty(count, one.name).nbytes


@given(any_format, st.data())
def test_a_format_is_found_under_each_of_its_names(one, data):
    name = data.draw(st.sampled_from([one.name, one.hlo, *one.aliases]))
    spelling = "".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in name)
    assert parse_format(f" {spelling} ") is one
    assert parse_format(one) is one
    assert spelled_as(spelling, ["mixed", one.name]) == one.name


def test_no_name_means_two_formats():
    names = [name for one in FORMATS for name in {one.name, one.hlo, *one.aliases}]
    assert len(names) == len(set(names))


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(TPUValidationError, match=r"'blfoat16' is not a number format.*'bfloat16'"):
        parse_format("blfoat16")
    with pytest.raises(TPUValidationError, match=r"'??' is not a number format. Usual ones are"):
        parse_format("??")


def test_settings_are_found_in_the_words_they_allow():
    assert spelled_as("bf16", ("float32", "bfloat16")) == "bfloat16"
    assert spelled_as("float8_e4m3fn", ("bf16", "int8", "fp8")) == "fp8"
    assert spelled_as("MIXED", ("mixed", "float32")) == "mixed"
    assert spelled_as("float16", ("bf16", "int8")) is None
    assert spelled_as("nonsense", ("bf16", "int8")) is None


NARROW = [one for one in FORMATS if one.bits <= 32]


TABLE = tpu_info()
IN_JAX = [name for name in generation_names() if name in [one.value for one in TABLE.ChipVersion]]


@pytest.mark.parametrize("name", IN_JAX)
def test_jax_says_the_same_of_the_matrix_unit(name):
    """jax 0.10.2 does not know 8t yet, nor four bits on 8i; a newer one may list some of them."""
    chip = get_chip(name)
    core = TABLE.get_tpu_info_for_chip(TABLE.ChipVersion(name), chip.cores_per_device)
    for one, weights in itertools.product(NARROW, NARROW):
        dtypes = np.dtype(one.name), np.dtype(weights.name)
        if chip.generation == 8 and weights.bits == 4:
            assert chip.multiplies(one, weights) or not core.is_matmul_supported(*dtypes), dtypes
        else:
            assert chip.multiplies(one, weights) == core.is_matmul_supported(*dtypes), dtypes


def test_weights_may_be_narrower_than_what_they_multiply():
    """By jax's newer table and openxla's: four bits as weights on 8i and 8t, never on 7x."""
    for name in ("8i", "8t"):
        chip = get_chip(name)
        assert chip.multiplies("bf16", "int4")
        assert chip.multiplies("fp8", "int4")
        assert not chip.multiplies("int4", "bf16")
        assert not chip.multiplies("int8")
    assert get_chip("8t").multiplies("int4")
    assert not get_chip("8i").multiplies("int4")
    assert not get_chip("7x").multiplies("bf16", "int4")
    assert not get_chip("v6e").multiplies("bf16", "int4")
    assert not get_chip("v6e").multiplies("int8", "int4")


def test_what_is_multiplied_as_it_is_has_a_rate_and_is_faster():
    """The v4's data sheet has a rate for int8 that its matrix unit has not: that of bfloat16."""
    for name in generation_names():
        chip = get_chip(name)
        wide = chip.peak("bf16").value
        rates = {peak: chip.peak(peak).value or 0 for peak in PEAKS[1:]}
        assert [peak for peak in rates if chip.multiplies(peak)] == [
            peak for peak, rate in rates.items() if rate > wide
        ]


def test_peaks_go_by_any_name():
    for one in FORMATS:
        if one.peak:
            assert get_chip("7x").peak(one.hlo) == get_chip("7x").peak_tflops[one.peak]
    assert re.search("float8_e5m2", str(get_chip("v6e").to_dict()["matrix_products"]))


@pytest.mark.parametrize("name", ["int2", "int4", "int8", "uint2", "uint4", "uint8"])
@pytest.mark.parametrize("module", [np, jax.numpy], ids=["numpy", "jax"])
def test_packed_values_come_back(name, module):
    format = parse_format(name)
    low = -(2 ** (format.bits - 1)) if format.kind == "integer" else 0
    values = np.random.default_rng(0).integers(low, format.largest + 1, (2, 32, 5))
    words = format.pack(module.asarray(values, dtype=module.int32))
    assert words.dtype == np.int32
    assert words.shape == (2, 32 // format.values_per_word, 5)
    assert words.nbytes == format.nbytes(values.size)
    np.testing.assert_array_equal(format.unpack(words), values)


def test_a_word_has_the_first_row_in_its_lowest_bits():
    words = parse_format("int4").pack(np.arange(8)[:, None])
    assert words.view(np.uint32)[0, 0] == 0x76543210


def test_native_matmuls_are_the_catalogs():
    int8, bfloat16 = parse_format("int8"), parse_format("bf16")
    assert int8.is_native_on(get_chip("v5e"))
    assert not int8.is_native_on(get_chip("v5e"), weights=bfloat16)
