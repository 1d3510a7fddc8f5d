"""GPTQ beside qwix's own, and integer formats against what they promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUValidationError
from tpukit.kernels import dequantize, quantize_weight
from tpukit.quantization.integers import ScaledInputs, gptq_round, quantize_integers, rounded_matrix

RNG = np.random.default_rng(0)
WEIGHT = jnp.asarray(RNG.normal(size=(8, 6)).astype(np.float32))
X = RNG.normal(size=(64, 8)).astype(np.float32) @ RNG.normal(size=(8, 8)).astype(np.float32)
HESSIAN = jnp.asarray(X.T @ X)


def output_error(weight, found, x):
    lost = np.asarray(x, np.float64) @ (np.asarray(weight, np.float64) - np.asarray(found))
    return (lost**2).sum()


def test_the_loop_gives_what_qwix_gives():
    from qwix._src.core import qarray
    from qwix.contrib import gptq_core

    how = qarray.HowToQuantize(qtype="int4", channelwise_axes=(0,), tiled_axes={1: 8})
    theirs, _ = gptq_core.quantize_weight(WEIGHT.T, HESSIAN, how)
    values, scales = gptq_round(WEIGHT, HESSIAN, bits=4, group=8)
    assert np.array_equal(values, np.asarray(theirs.qvalue, np.int8).T)
    np.testing.assert_allclose(scales, theirs.scale.T, rtol=1e-5)


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_nearest_by_qwix_is_near_the_kernels_own(format):
    weight = jnp.asarray(RNG.normal(size=(160, 16)).astype(np.float32))
    found, own = quantize_integers(weight, format), quantize_weight(weight, format)
    assert found.bits_per_weight == own.bits_per_weight
    errors = [np.mean((np.asarray(weight) - np.asarray(dequantize(q))) ** 2) for q in (found, own)]
    assert errors[0] < 1.05 * errors[1]


def test_gptq_and_awq_lose_less_of_the_output_than_nearest():
    rng = np.random.default_rng(1)
    weight = jnp.asarray(rng.normal(size=(64, 24)).astype(np.float32))
    mixing = rng.normal(size=(64, 64)) * np.exp(rng.normal(size=64))
    x = (rng.normal(size=(512, 64)) @ mixing).astype(np.float32)
    hessian = jnp.asarray(x.T @ x)
    errors = {
        method: output_error(
            weight, rounded_matrix(weight, 3, group=32, hessian=hessian, method=method)[0], x
        )
        for method in ("nearest", "gptq", "awq")
    }
    assert errors["gptq"] < 0.7 * errors["nearest"]
    assert errors["awq"] < 1.02 * errors["nearest"]


def test_awq_keeps_the_scales_of_its_inputs():
    made = quantize_integers(WEIGHT, "int4", hessian=HESSIAN, method="awq")
    assert isinstance(made, ScaledInputs)
    found = jnp.asarray(X) @ made
    np.testing.assert_allclose(found, X @ np.asarray(made.dequantize()), rtol=0.02, atol=0.2)
    assert made.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(made))


def test_what_a_method_lacks_is_said():
    with pytest.raises(TPUValidationError, match="hessian"):
        quantize_integers(WEIGHT, "int4", method="gptq")
    with pytest.raises(TPUValidationError, match="Did you mean 'gptq'"):
        quantize_integers(WEIGHT, "int4", hessian=HESSIAN, method="gpqt")
