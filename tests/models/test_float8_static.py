"""Products in eight-bit floats as published: the numbers of qwix, and eight bits on the chip."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwix._src.core.dot_general_qt import DotGeneralQtConfig, dot_general_qt

from tpukit.compiler import compile_for
from tpukit.models.matmul.eight_bit import float8_channels_matmul, float8_static_matmul

LAST_WITH_FIRST = (((2,), (0,)), ((), ()))


def truth(bound: float | None):
    method = "absmax" if bound is None else f"fixed,{-bound},{bound}"
    config = DotGeneralQtConfig(
        lhs_qtype=jnp.float8_e4m3fn,
        rhs_qtype=jnp.float8_e4m3fn,
        lhs_calibration_method=method,
        rhs_calibration_method=method,
        dlhs_grad_qtype=jnp.float8_e5m2,
        drhs_grad_qtype=jnp.float8_e5m2,
    )
    return lambda x, matrix: dot_general_qt(x, matrix, LAST_WITH_FIRST, config)


def ours(bound: float | None):
    if bound is None:
        return float8_channels_matmul
    return lambda x, matrix: float8_static_matmul(x, matrix, bound=bound)


def operands(dtype: str):
    """Activations and weights of which some lie outside ±224, and a gradient with a zero row."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 20, 64)) * 100
    matrix = rng.normal(size=(64, 48)) * np.exp(rng.normal(size=48) * 3)
    gradient = rng.normal(size=(3, 20, 48)) * np.exp(rng.normal(size=(3, 20, 1)) * 4)
    gradient[0, 0] = 0
    return [jnp.asarray(one, dtype) for one in (x, matrix, gradient)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bound", [224.0, 100.0, None])
def test_it_has_the_numbers_of_qwix(bound, dtype):
    x, matrix, gradient = operands(dtype)
    found, pull = jax.vjp(ours(bound), x, matrix)
    expected, pull_expected = jax.vjp(truth(bound), x, matrix)
    results = (found, *pull(gradient)), (expected, *pull_expected(gradient))
    for one, other in zip(*results, strict=True):
        assert one.dtype == dtype
        # In bfloat16 to the bit; float32 shows in which order a sum was taken.
        sums = np.abs(np.asarray(other, np.float32)).max() if dtype == "float32" else 0
        np.testing.assert_allclose(
            one.astype("float32"), other.astype("float32"), rtol=0, atol=1e-6 * sums
        )


def test_what_is_cut_off_has_no_gradient():
    x, matrix, gradient = operands("float32")
    outside = np.abs(np.asarray(x)) > 224
    assert outside.any()
    dx, _ = jax.vjp(float8_static_matmul, x, matrix)[1](gradient)
    assert not np.asarray(dx)[outside].any()
    kept, _ = jax.vjp(float8_channels_matmul, x, matrix)[1](gradient)
    assert np.asarray(kept)[outside].any()


def test_only_eight_bits_and_a_mask_are_kept():
    x, matrix, _ = operands("bfloat16")
    _, pull = jax.vjp(float8_static_matmul, x, matrix)
    kept = {leaf.dtype.name for leaf in jax.tree.leaves(pull) if leaf.size > 1}
    assert kept == {"float8_e4m3fn", "bool"}


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
@pytest.mark.parametrize("matmul", [float8_static_matmul, float8_channels_matmul])
def test_the_compiler_multiplies_eight_bits_on_7x(matmul):
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)

    def all_three(x, matrix, gradient):
        y, pull = jax.vjp(matmul, x, matrix)
        return y, pull(gradient)

    text = compile_for(all_three, "tpu7x-1x1x1", shape, shape, shape).hlo
    formats = dict(re.findall(r"%([\w.-]+) = (\w+)\[", text))
    products = re.findall(r" convolution\(%([\w.-]+), %([\w.-]+)\)", text)
    operands = sorted(sorted(formats[name] for name in pair) for pair in products)
    assert operands == [["f8e4m3fn", "f8e4m3fn"], *[["f8e4m3fn", "f8e5m2"]] * 2]
