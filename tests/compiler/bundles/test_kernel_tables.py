"""Tables in scalar memory: every element is where XLA's tiled layouts put it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.compiler.bundles import words_of
from tpukit.compiler.hlo import parse_shapes
from tpukit.errors import XLACompilationError


def element(words, shape, place, *, tile, packed, bits):
    """One element by the textbook rule, for one tile and rows packed into words."""
    rows, columns = tile
    tiles_across = -(-shape[1] // columns)
    row, column = place
    start = ((row // rows) * tiles_across + column // columns) * (rows // packed) * columns
    word = words[start + (row % rows // packed) * columns + column % columns]
    value = (word >> (row % packed * bits)) & (2**bits - 1)
    return value - 2**bits if value >= 2 ** (bits - 1) else value


@pytest.mark.parametrize(
    ("text", "tile", "packed", "bits", "dtype"),
    [
        ("s32[{},{}]{{1,0:T(8,128)}}", (8, 128), 1, 32, np.int32),
        ("s32[{},{}]{{1,0:T(1,128)}}", (1, 128), 1, 32, np.int32),
        ("s8[{},{}]{{1,0:T(8,128)(4,1)}}", (8, 128), 4, 8, np.int8),
        ("s8[{},{}]{{1,0:T(32,128)(4,1)}}", (32, 128), 4, 8, np.int8),
        ("s16[{},{}]{{1,0:T(8,128)(2,1)}}", (8, 128), 2, 16, np.int16),
    ],
)
@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 200), seed=st.integers(0, 9))
def test_elements_lie_where_the_layout_says(text, tile, packed, bits, dtype, rows, columns, seed):
    (shape,) = parse_shapes(text.format(rows, columns))
    limits = np.iinfo(dtype)
    values = np.random.default_rng(seed).integers(
        limits.min, limits.max, (rows, columns), dtype, endpoint=True
    )
    words = words_of(values, shape)
    for place in [(0, 0), (rows - 1, columns - 1), (rows // 2, columns // 3)]:
        assert element(words, (rows, columns), place, tile=tile, packed=packed, bits=bits) == int(
            values[place]
        )


def test_a_one_dimensional_table_packs_rows_of_128():
    (shape,) = parse_shapes("s8[600]{0:T(512)(128)(4,1)}")
    values = np.arange(600, dtype=np.int64).astype(np.int8)
    words = words_of(values, shape)
    for index in (0, 127, 128, 511, 512, 599):
        tile, rest = divmod(index, 512)
        byte = (words[tile * 128 + rest % 128] >> (rest // 128 * 8)) & 0xFF
        assert byte == int(values[index]) & 0xFF


def test_a_scalar_is_one_word():
    (shape,) = parse_shapes("s32[]")
    assert words_of(np.int32(-7), shape) == (-7,)


def test_floats_and_other_shapes_are_refused():
    (shape,) = parse_shapes("s32[4]{0:T(128)}")
    with pytest.raises(XLACompilationError, match="only integers"):
        words_of(np.ones(4, np.float32), shape)
    with pytest.raises(XLACompilationError, match=r"has shape \(5,\), but"):
        words_of(np.ones(5, np.int32), shape)
