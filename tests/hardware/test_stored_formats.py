"""Sizes of what is stored narrow follow from its definition."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from tpukit.hardware.formats import BFLOAT16, FLOAT32, INT4, INT8, parse_format
from tpukit.hardware.stored_formats import MOMENT_FORMATS, WEIGHT_FORMATS, StoredFormat


def test_bits_by_hand():
    bits = {name: one.bits_per_value(4096, 1000) for name, one in WEIGHT_FORMATS.items()}
    assert bits["bf16"] == 16
    assert bits["int4"] == 4.25
    assert bits["int8"] == bits["fp8"] == 8 + 32 / 4096
    assert bits["vq"] == 2 + 32 / 4096 + 8 * 512 / 4096 / 1000


def test_narrow_scales_are_cheaper_and_smaller_blocks_dearer():
    wide = StoredFormat(values=INT4, scales=FLOAT32, block=128)
    narrow = StoredFormat(values=INT4, scales=BFLOAT16, block=128)
    shared = StoredFormat(values=INT4, scales=parse_format("e8m0"), block=32)
    assert narrow.bits_per_value(1280) == 4 + 16 / 128
    assert shared.bits_per_value(1280) == 4.25 == wide.bits_per_value(1280)


STORED = [*WEIGHT_FORMATS.values(), *(one for pair in MOMENT_FORMATS.values() for one in pair)]


@given(st.sampled_from(STORED), st.integers(1, 5000), st.integers(1, 300))
def test_parts_add_up_one_by_one(stored, length, lines):
    """The same, counted value by value and block by block."""
    padded = length
    while padded % stored.padded_to:
        padded += 1
    codes = len(range(0, padded, stored.group)) * stored.stages * lines
    blocks = len(range(0, padded, stored.block or padded)) * lines
    bits = codes * stored.values.bits
    bits += blocks * stored.scales.bits if stored.scales else 0
    bits += stored.stages * stored.entries * stored.group * INT8.bits
    assert stored.nbytes(length, lines) == -(-bits // 8)
    exact = Fraction(8 * stored.nbytes(length, lines), length * lines)
    assert stored.bits_per_value(length, lines) == float(exact)


def test_small_and_empty_arrays_by_hand():
    assert WEIGHT_FORMATS["bf16"].nbytes(3) == 3 * 2  # one line, and nothing filled up
    assert WEIGHT_FORMATS["bf16"].bits_per_value(3) == 16
    assert WEIGHT_FORMATS["int8"].nbytes(3, 5) == 5 * (128 + 4)  # up to whole lanes, and a scale
    assert WEIGHT_FORMATS["int8"].nbytes(0, 5) == 0
    assert WEIGHT_FORMATS["int4"].nbytes(129) == 256 // 2 + 2 * 4
    assert WEIGHT_FORMATS["vq"].nbytes(128) == 128 // 4 + 4 + 128 * 4  # with its codebook


def test_moments_share_a_scale_in_blocks_of_256():
    """As the eight-bit optimizers of bitsandbytes do."""
    for moment in MOMENT_FORMATS["int8"]:
        assert moment.nbytes(7 * 256) == 7 * (256 + 4)
        assert moment.nbytes(7 * 256 + 1) == 7 * (256 + 4) + 1 + 4
    first, second = MOMENT_FORMATS["bfloat16"]
    assert (first.nbytes(9, 2), second.nbytes(9, 2)) == (36, 72)
