"""A weight format is one entry of one table: an invented one is rounded, packed and counted."""

import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUKernelError, TPUValidationError
from tpukit.hardware.formats import FLOAT32, signed_integer
from tpukit.hardware.stored_formats import WEIGHT_FORMATS, StoredFormat
from tpukit.kernels import dequantize, quantize_weight, quantized_matmul, unpack
from tpukit.quantization.integers import quantize_integers
from tpukit.quantization.plan import check_format

# Ten values of three bits share a word of 32, so lines are padded to multiples of 640.
INT3 = StoredFormat(values=signed_integer(3), scales=FLOAT32, block=128, padded_to=128)
SHAPE = (700, 6)


@pytest.fixture
def int3(monkeypatch):
    monkeypatch.setitem(WEIGHT_FORMATS, "int3", INT3)
    return jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), jnp.float32)


def test_without_its_entry_it_is_unknown():
    with pytest.raises(TPUKernelError, match="'int3' is unknown"):
        quantize_weight(jnp.ones(SHAPE), "int3")
    with pytest.raises(TPUValidationError, match="'int3' is no format of a plan"):
        check_format("int3")


def test_values_are_packed_and_unpacked():
    values = np.random.default_rng(1).integers(-4, 4, (1280, 5)).astype(np.int8)
    words = INT3.pack(values)
    assert (words.shape, words.dtype) == ((128, 5), np.int32)
    np.testing.assert_array_equal(INT3.unpack(words), values)
    np.testing.assert_array_equal(INT3.unpack(INT3.pack(jnp.asarray(values))), values)


def test_a_matrix_is_rounded_and_its_bytes_are_counted(int3):
    weight = quantize_weight(int3, "int3")
    assert weight.data.shape == (1280 // 10, 6)
    assert weight.nbytes == INT3.nbytes(*SHAPE) == 6 * (128 * 4 + 10 * 4)
    values, scales = unpack(weight)
    assert np.abs(values).max() == 3
    error = np.abs(np.asarray(dequantize(weight)) - np.asarray(int3, np.float64))
    steps = np.repeat(np.asarray(scales), 128, axis=0)[: SHAPE[0]]
    assert (error <= steps / 2 + 1e-6).all()


def test_it_is_multiplied_and_planned_and_rounded_by_qwix(int3):
    pytest.importorskip("qwix")
    assert check_format("int3") == "int3"
    weight = quantize_weight(int3, "int3")
    x = np.random.default_rng(2).normal(size=(4, SHAPE[0])).astype(np.float32)
    out = quantized_matmul(jnp.asarray(x), weight, implementation="reference")
    wanted = x.astype(np.float64) @ np.asarray(dequantize(weight), np.float64)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-4)
    by_qwix = quantize_integers(int3, "int3")
    assert by_qwix.format == "int3"
    assert by_qwix.nbytes == INT3.nbytes(*SHAPE)
