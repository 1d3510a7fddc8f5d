"""A product with packed weights is the product with what they stand for, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from tpukit.errors import TPUKernelError
from tpukit.kernels.ops.quantized_matmul import pallas_tpu
from tpukit.kernels.ops.quantized_matmul.api import quantized_matmul
from tpukit.kernels.ops.quantized_matmul.pallas_tpu import QuantizedBlocks
from tpukit.kernels.ops.quantized_matmul.weight import (
    dequantize,
    pack_vq,
    quantize_rows,
    quantize_weight,
)

# More than one block along every axis, and the last one of rows and columns sticks out.
ROWS, WIDTH, COLUMNS = 40, 200, 150
BLOCKS = QuantizedBlocks(rows=32, columns=128, contraction=128)
KINDS = ("int8", "int4", "fp8", "vq128", "vq256", "vq2x128")


def draw(kind, width=WIDTH, columns=COLUMNS, seed=0):
    rng = np.random.default_rng(seed)
    if not kind.startswith("vq"):
        return quantize_weight(jnp.asarray(rng.normal(size=(width, columns)), jnp.float32), kind)
    stages, entries = {"vq128": (1, 128), "vq256": (1, 256), "vq2x128": (2, 128)}[kind]
    codes = rng.integers(0, entries, (stages, width // 4, columns)).astype(np.uint8)
    codebook = rng.integers(-127, 128, (stages, entries, 4)).astype(np.int8)
    scales = rng.random(columns).astype(np.float32) + 0.5
    return pack_vq(*map(jnp.asarray, (codes, codebook, scales)))


def activations_of(rows=ROWS, width=WIDTH, seed=1):
    x = np.random.default_rng(seed).normal(size=(rows, width))
    return jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)


def by_numpy(x, weight, activations):
    left = np.asarray(x, np.float64)
    if activations == "int8":
        values, scales = (np.asarray(part, np.float64) for part in quantize_rows(x))
        left = values * scales
    return left @ np.asarray(dequantize(weight), np.float64)


def assert_close(seen, expected, tolerance=2e-6):
    error = np.abs(np.asarray(seen, np.float64) - expected).max()
    assert error <= tolerance * np.abs(expected).max()


def in_kernel(x, weight, activations, blocks=BLOCKS, interpret=True, index=None):
    missing = -x.shape[1] % 128
    return pallas_tpu.forward(
        jnp.pad(x, ((0, 0), (0, missing))),
        *(weight.data, weight.scales, weight.codebook, index),
        format=weight.format,
        activations=activations,
        blocks=blocks,
        interpret=interpret,
    )


@pytest.mark.parametrize(
    ("kind", "activations"),
    [
        *((kind, "bfloat16") for kind in KINDS),
        ("int8", "int8"),
        ("int4", "int8"),
        ("vq256", "int8"),
    ],
)
def test_the_kernel_is_the_product(kind, activations):
    x, weight = activations_of(), draw(kind)
    assert_close(in_kernel(x, weight, activations), by_numpy(x, weight, activations))


@pytest.mark.parametrize("kind", ["int8", "int4", "vq256"])
def test_a_matrix_of_a_stack_is_read_where_it_lies(kind):
    x, each = activations_of(), [draw(kind, seed=seed) for seed in range(3)]
    stack, index = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each), jnp.int32(1)
    expected = by_numpy(x, each[1], "bfloat16")
    assert_close(in_kernel(x, stack, "bfloat16", index=index), expected)
    found, pull = jax.vjp(lambda x: quantized_matmul(x, stack, index=index), x)
    assert_close(found, expected, 2e-2)  # through bfloat16
    (d_x,) = pull(found)
    assert_close(d_x, np.asarray(found, np.float64) @ np.asarray(dequantize(each[1])).T, 1e-5)


@pytest.mark.parametrize("kind", ["int4", "vq256"])
def test_the_kernel_in_the_tpu_interpreter(kind, no_races):
    x, weight = activations_of(), draw(kind)
    watchful = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    with no_races():
        seen = in_kernel(x, weight, "bfloat16", interpret=watchful)
    assert_close(seen, by_numpy(x, weight, "bfloat16"))


@settings(max_examples=3, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 70), st.integers(1, 60), st.integers(1, 300))
def test_the_kernel_at_any_shape(kind, rows, quads, columns):
    x, weight = activations_of(rows, 4 * quads), draw(kind, 4 * quads, columns)
    assert_close(in_kernel(x, weight, "bfloat16"), by_numpy(x, weight, "bfloat16"))


@pytest.mark.parametrize("activations", ["bfloat16", "int8"])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_every_path_and_its_gradient(implementation, activations):
    x, weight = activations_of().reshape(2, 20, WIDTH), draw("int4")

    @jax.jit
    def step(x, weight):
        call = lambda x: quantized_matmul(  # noqa: E731
            x, weight, activations=activations, implementation=implementation
        )
        out, pull = jax.vjp(call, x)
        return out, pull(jnp.cos(out))[0]

    out, d_x = step(x, weight)
    rounding = 2e-6 if implementation == "reference" or activations == "int8" else 4e-3
    assert out.dtype == x.dtype
    assert_close(
        out.reshape(ROWS, -1), by_numpy(x.reshape(ROWS, -1), weight, activations), rounding
    )
    expected = np.asarray(jnp.cos(out), np.float64) @ np.asarray(dequantize(weight), np.float64).T
    assert_close(d_x, expected, 2e-6)


def test_blocks_tuned_for_a_larger_size_are_cut(monkeypatch):
    tuned = QuantizedBlocks(rows=32, columns=128, contraction=512)
    monkeypatch.setattr(pallas_tpu, "blocks_for", lambda *_: tuned)
    x, weight = activations_of(width=384), draw("int8", width=384)
    seen = in_kernel(x, weight, "bfloat16", blocks=None)
    assert_close(seen, by_numpy(x, weight, "bfloat16"))


def test_what_is_wrong_is_said():
    x, weight = activations_of(), draw("fp8")
    with pytest.raises(TPUKernelError, match="int8 activations cannot multiply them"):
        quantized_matmul(x, weight, activations="int8")
    with pytest.raises(TPUKernelError, match="Did you mean 'bfloat16'"):
        quantized_matmul(x, weight, activations="float16")
    with pytest.raises(TPUKernelError, match="a multiple of 128 that divides 256"):
        in_kernel(x, weight, "bfloat16", blocks=QuantizedBlocks(32, 128, 384))
