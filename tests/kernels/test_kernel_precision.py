"""Precision modes compute what they say, and say where they exist."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUKernelError
from tpukit.kernels.precision import PrecisionConfig

RNG = np.random.default_rng(0)
A = jnp.asarray(RNG.normal(size=(16, 64)), jnp.float32)
B = jnp.asarray(RNG.normal(size=(64, 16)), jnp.float32)
EXACT = np.asarray(A, np.float64) @ np.asarray(B, np.float64)


def product(a, b):
    return a @ b


def error(mode):
    found = np.asarray(mode.apply(product, A, B), np.float64)
    return np.abs(found - EXACT).max()


def test_each_mode_is_as_exact_as_it_says():
    assert error(PrecisionConfig.FP32) < 1e-4
    assert 1e-3 < error(PrecisionConfig.BFLOAT16) < 0.2
    assert error(PrecisionConfig.BFLOAT16) < error(PrecisionConfig.FP8) < 1.5


def test_mixed_gives_float32_and_the_others_what_came_in():
    half = A.astype(jnp.bfloat16)
    assert PrecisionConfig.MIXED.apply(product, half, B).dtype == jnp.float32
    assert PrecisionConfig.FP32.apply(product, half, B).dtype == jnp.bfloat16


def test_fp8_values_are_on_the_fp8_grid_and_gradients_pass():
    seen = PrecisionConfig.FP8.apply(lambda x: x, A * 1e6)
    scale = 2.0 ** np.ceil(np.log2(np.abs(np.asarray(A) * 1e6).max() / 448))
    grid = (np.asarray(A) * np.float32(1e6) / scale).astype(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(seen), grid.astype(np.float32) * np.float32(scale))
    gradient = jax.grad(lambda x: PrecisionConfig.FP8.apply(lambda y: 3 * y, x).sum())(A)
    np.testing.assert_array_equal(gradient, np.full(A.shape, 3.0))
    assert PrecisionConfig.FP8.apply(product, 0 * A, B).max() == 0


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("bf16", PrecisionConfig.BFLOAT16),
        ("float32", PrecisionConfig.FP32),
        ("float8_e4m3fn", PrecisionConfig.FP8),
        ("HIGHEST", PrecisionConfig.FP32),
        ("high", PrecisionConfig.HIGH),
        ("mixed", PrecisionConfig.MIXED),
    ],
)
def test_modes_have_names(name, mode):
    assert PrecisionConfig.parse(name) is mode
    assert PrecisionConfig.parse(mode) is mode


def test_high_and_highest_are_jax_precisions():
    assert PrecisionConfig.HIGH.jax_precision is jax.lax.Precision.HIGH
    assert PrecisionConfig.FP32.jax_precision is jax.lax.Precision.HIGHEST
    assert PrecisionConfig.HIGH.to_dict()["matmul_precision"] == "high"


def test_the_catalog_says_who_has_fp8():
    PrecisionConfig.FP8.check(None)
    PrecisionConfig.HIGH.check("v5p")
    for chip in ("7x", "8i", "8t"):
        PrecisionConfig.FP8.check(chip)
    for chip in ("v4", "v5e", "v5p", "v6e"):
        words = rf"matrix unit of {chip} has no fp8; 7x, 8i, 8t have it.*use precision='bf16'"
        with pytest.raises(TPUKernelError, match=words):
            PrecisionConfig.FP8.check(chip)
