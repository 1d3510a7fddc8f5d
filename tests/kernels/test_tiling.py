"""Packings have exact inverses, and padding says what it adds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.errors import TPUKernelError
from tpukit.kernels.blocks.tiling import (
    from_blocked,
    pack_tiles,
    pad_to_tiles,
    tile_padding,
    tile_shape,
    to_blocked,
    unpack_tiles,
    unpad,
)

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


def counted(shape, dtype):
    return (np.arange(np.prod(shape)).reshape(shape) % 100).astype(jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [("float32", 8), ("int32", 8), ("bfloat16", 16), ("int8", 32), ("float8_e4m3fn", 32)],
)
def test_narrower_values_are_packed_in_taller_tiles(dtype, rows):
    assert tile_shape(dtype) == (rows, 128)


def test_a_tile_of_int4_holds_64_rows_and_of_float64_does_not_exist():
    assert tile_shape(jnp.int4) == (64, 128)
    with pytest.raises(TPUKernelError, match=r"no 64-bit tiles \(dtype float64\)"):
        tile_shape("float64")


sizes = st.integers(1, 40)


@settings(deadline=None, max_examples=50)
@given(st.lists(sizes, min_size=1, max_size=3), st.integers(1, 140), st.sampled_from(DTYPES))
def test_padding_and_packing_are_undone_exactly(leading, width, dtype):
    shape = (*leading, width)
    x = counted(shape, dtype)
    padded, padding = pad_to_tiles(x)
    rows, lanes = tile_shape(dtype)
    assert padded.shape[-1] % lanes == padded.shape[-2] % rows == 0
    assert np.array_equal(unpad(padded, padding), x)
    added = 1 - x.size / padded.size
    assert padding.added_fraction == pytest.approx(added)
    assert padded.astype(np.float64).sum() == x.astype(np.float64).sum()
    packed = pack_tiles(x)
    assert packed.shape[-2:] == (rows, lanes)
    assert np.array_equal(unpack_tiles(packed, shape), x)


def test_a_tile_holds_neighbours_under_jit_too():
    x = jnp.arange(16 * 250).reshape(16, 250)
    packed = jax.jit(pack_tiles)(x)
    assert packed.shape == (2, 2, 8, 128)
    assert packed[1, 1, 3, 5] == x[8 + 3, 128 + 5]
    assert np.array_equal(unpack_tiles(packed, x.shape), x)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 2), st.integers(1, 20), st.integers(1, 20), st.integers(1, 3))
def test_the_blocked_layout_is_undone_exactly(batch, height, width, channels):
    x = counted((batch, height, width, channels), "float32")
    blocked = to_blocked(x, block=8)
    assert blocked.shape == (batch, -(-height // 8), -(-width // 8), 8, 8, channels)
    assert np.array_equal(from_blocked(blocked, height=height, width=width), x)


def test_the_blocked_layout_has_the_documents_indices():
    x = jnp.arange(200 * 300.0).reshape(1, 200, 300, 1)
    blocked = to_blocked(x)
    assert blocked.shape == (1, 2, 3, 128, 128, 1)
    h, w = 150, 270
    assert blocked[0, h // 128, w // 128, h % 128, w % 128, 0] == x[0, h, w, 0]


def test_padding_is_reported():
    padding = tile_padding((100, 200), "bfloat16")
    assert padding.padded_shape == (112, 256)
    assert padding.to_dict()["added"] == [12, 56]
    assert padding.__rich__().endswith("30.2% of it is padding")


def test_refusals_teach():
    x = jnp.ones((4, 4))
    with pytest.raises(TPUKernelError, match="slice it before changing its shape"):
        unpad(x, tile_padding((4, 4), x.dtype))
    with pytest.raises(TPUKernelError, match="reshape it to two axes"):
        pack_tiles(jnp.ones(3))
    with pytest.raises(TPUKernelError, match="give the shape that was packed"):
        unpack_tiles(pack_tiles(x), (9, 4))
    with pytest.raises(TPUKernelError, match="until it has four"):
        to_blocked(x)
    with pytest.raises(TPUKernelError, match="are not those of 9 x 4"):
        from_blocked(to_blocked(x[None, :, :, None], block=8), height=9, width=4)
