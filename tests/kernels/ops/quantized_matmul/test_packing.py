"""What is packed is unpacked to the last bit, and stands for what numpy says."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.errors import TPUKernelError
from tpukit.hardware.stored_formats import WEIGHT_FORMATS
from tpukit.kernels.ops.quantized_matmul import weight as packing
from tpukit.kernels.ops.quantized_matmul.weight import QuantizedWeight

# Compiled whole: at every new shape that takes less than one operation after the other.
dequantize = jax.jit(packing.dequantize)
pack_fp8 = jax.jit(packing.pack_fp8)
pack_int4 = jax.jit(packing.pack_int4, static_argnames="group")
pack_int8 = jax.jit(packing.pack_int8)
pack_vq = jax.jit(packing.pack_vq)
quantize_weight = jax.jit(packing.quantize_weight, static_argnums=1)
unpack = jax.jit(packing.unpack)

rows = st.integers(1, 300)
columns = st.integers(1, 9)
seeds = st.integers(0, 2**31)
FEW = settings(max_examples=5, deadline=None)


def same(one, other):
    return one.dtype == other.dtype and np.array_equal(
        np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8)
    )


@FEW
@given(rows, columns, seeds, st.sampled_from([128, 256]))
def test_int4_there_and_back(rows, columns, seed, group):
    rng = np.random.default_rng(seed)
    values = rng.integers(-8, 8, (rows, columns)).astype(np.int8)
    scales = rng.random((-(-rows // group), columns)).astype(np.float32)
    weight = pack_int4(jnp.asarray(values), jnp.asarray(scales), group=group)
    assert weight.data.dtype == jnp.int32
    assert weight.group == group
    seen = unpack(weight)
    assert same(seen[0], values)
    assert same(seen[1], scales)
    again = pack_int4(*seen, group=weight.group)
    assert same(again.data, weight.data)
    expected = values * np.repeat(scales, group, axis=0)[:rows]
    np.testing.assert_array_equal(dequantize(weight), expected)


@FEW
@given(rows, columns, seeds)
def test_int8_and_fp8_there_and_back(rows, columns, seed):
    rng = np.random.default_rng(seed)
    scales = rng.random(columns).astype(np.float32)
    whole = jnp.asarray(rng.integers(-128, 128, (rows, columns)).astype(np.int8))
    parts = jnp.asarray(rng.normal(size=(rows, columns)) * 100, jnp.float8_e4m3fn)
    for pack, values in ((pack_int8, whole), (pack_fp8, parts)):
        weight = pack(values, jnp.asarray(scales))
        seen = unpack(weight)
        assert same(seen[0], values)
        assert same(seen[1], scales)
        expected = np.asarray(values.astype(jnp.float32)) * scales
        np.testing.assert_array_equal(dequantize(weight), expected)


@FEW
@given(st.integers(1, 70), columns, seeds, st.sampled_from([128, 256]), st.sampled_from([1, 2]))
def test_vector_codes_there_and_back(quads, columns, seed, entries, stages):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, entries, (stages, quads, columns)).astype(np.uint8)
    codebook = rng.integers(-127, 128, (stages, entries, 4)).astype(np.int8)
    scales = rng.random(columns).astype(np.float32)
    weight = pack_vq(*map(jnp.asarray, (codes, codebook, scales)))
    assert weight.shape == (4 * quads, columns)
    for seen, given_ in zip(unpack(weight), (codes, codebook, scales), strict=True):
        assert same(seen, given_)
    vectors = sum(codebook[s].astype(np.int32)[codes[s]] for s in range(stages))
    expected = vectors.transpose(0, 2, 1).reshape(4 * quads, columns) * scales
    np.testing.assert_array_equal(dequantize(weight), expected.astype(np.float32))


@pytest.mark.parametrize(("format", "steps"), [("int8", 127), ("int4", 7), ("fp8", None)])
def test_rounding_is_to_the_nearest(format, steps):
    w = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    w[:, 1] = 0
    weight = quantize_weight(jnp.asarray(w), format)
    error = np.abs(np.asarray(dequantize(weight)) - w)
    if steps is None:
        assert (error <= np.abs(w) * 2**-4 + 1e-3).all()
    else:
        assert (error <= np.abs(w).max(0) / steps / 2 + 1e-6).all()
    assert (error[:, 1] == 0).all()


def stored_format(weight):
    """The format of a weight, by the shapes of its arrays."""
    stored = WEIGHT_FORMATS[weight.format]
    if weight.format == "int4":
        return replace(stored, block=weight.group, padded_to=weight.group)
    if weight.codebook is None:
        return stored
    stages, tables, lanes = weight.codebook.shape
    return replace(stored, stages=stages, entries=tables * lanes)


@pytest.mark.parametrize("rows", [1, 127, 128, 200, 513])
@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_arrays_take_the_bytes_that_the_format_says(format, rows):
    weight = quantize_weight(jnp.ones((rows, 3)), format)
    held = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(weight))
    assert held == weight.nbytes == WEIGHT_FORMATS[format].nbytes(rows, 3)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["int8", "fp8", "int4"]),
    st.integers(1, 3000),
    st.integers(1, 500),
    st.sampled_from([128, 256, 512]),
)
def test_every_shape_takes_the_bytes_that_the_format_says(format, rows, columns, group):
    matrix = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    weight = jax.eval_shape(lambda w: packing.quantize_weight(w, format, group=group), matrix)
    assert weight.nbytes == stored_format(weight).nbytes(rows, columns)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 500), columns, st.sampled_from([128, 256]), st.integers(1, 3))
def test_codes_take_the_bytes_that_the_format_says(quads, columns, entries, stages):
    arrays = (
        jax.ShapeDtypeStruct((stages, quads, columns), jnp.uint8),
        jax.ShapeDtypeStruct((stages, entries, 4), jnp.int8),
        jax.ShapeDtypeStruct((columns,), jnp.float32),
    )
    weight = jax.eval_shape(packing.pack_vq, *arrays)
    assert weight.nbytes == stored_format(weight).nbytes(4 * quads, columns)


def test_bits_are_counted_with_scales_and_codebook():
    w = jnp.ones((1024, 256))
    assert quantize_weight(w, "int4").bits_per_weight == 4 + 32 / 128
    assert quantize_weight(w, "int8").bits_per_weight == 8 + 32 / 1024
    codes = jnp.zeros((1, 256, 256), jnp.uint8)
    weight = pack_vq(codes, jnp.zeros((1, 256, 4), jnp.int8), jnp.ones(256))
    assert weight.bits_per_weight == 2 + (256 * 32 + 256 * 32) / (1024 * 256)
    assert weight.to_dict()["entries"] == 256
    assert "bits per weight" in weight.__rich__()
    assert isinstance(weight, QuantizedWeight)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_int8(jnp.ones((4, 4)), jnp.ones(4)), "expected int8"),
        (lambda: pack_int8(jnp.ones((4, 4), jnp.int8), jnp.ones(3)), r"expected \(4,\)"),
        (
            lambda: pack_int4(jnp.ones((4, 4), jnp.int8), jnp.ones((1, 4)), group=64),
            "group=64 must be a multiple of 128",
        ),
        (
            lambda: pack_vq(
                jnp.zeros((1, 2, 4), jnp.uint8), jnp.zeros((1, 64, 4), jnp.int8), jnp.ones(4)
            ),
            "with 128 or 256 entries",
        ),
        (lambda: quantize_weight(jnp.ones((4, 4)), "vq"), "needs a codebook"),
        (lambda: quantize_weight(jnp.ones((4, 4)), "int5"), "Did you mean 'int[48]'"),
    ],
)
def test_what_is_wrong_is_said(call, message):
    with pytest.raises(TPUKernelError, match=message):
        call()
