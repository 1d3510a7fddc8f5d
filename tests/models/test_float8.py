"""Products in eight-bit floats: near those of float64, and multiplied as such by the compiler."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.compiler import compile_for
from tpukit.models.matmul.eight_bit import float8_matmul


def test_products_and_gradients_are_near_those_of_float64():
    rng = np.random.default_rng(0)
    x, matrix = rng.normal(size=(2, 16, 256)) * 30, rng.normal(size=(256, 64)) * 1e-3
    weight = rng.normal(size=(2, 16, 64))

    def total(x, matrix):
        return jnp.sum(float8_matmul(x, matrix) * weight)

    as_float = jnp.asarray(x, jnp.float32), jnp.asarray(matrix, jnp.float32)
    y = np.asarray(float8_matmul(*as_float), np.float64)
    dx, dmatrix = jax.grad(total, argnums=(0, 1))(*as_float)
    truths = (x @ matrix, weight @ matrix.T, np.einsum("bsk,bsn->kn", x, weight))
    # Rounding errors of 2^-4 (e4m3) and 2^-3 (e5m2) at most, uniform and independent, against the
    # root mean square: sqrt(1/3) of the bound for each operand, with room.
    for found, truth, bound in zip((y, dx, dmatrix), truths, (0.06, 0.11, 0.11), strict=True):
        error = np.sqrt(np.mean((found - truth) ** 2) / np.mean(truth**2))
        assert 0.005 < error < bound


def test_nothing_and_the_largest_are_kept():
    x = jnp.asarray([[0.0, 0.0], [3e30, -3e30]], jnp.float32)
    np.testing.assert_array_equal(float8_matmul(x * 0, jnp.eye(2)), np.zeros((2, 2)))
    np.testing.assert_allclose(float8_matmul(x, jnp.eye(2)), x, rtol=1e-6)


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_the_compiler_multiplies_eight_bits_on_7x():
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)

    def gradients(x, matrix):
        return jax.grad(lambda x, m: float8_matmul(x, m).astype(jnp.float32).sum(), (0, 1))(
            x, matrix
        )

    text = compile_for(gradients, "tpu7x-1x1x1", shape, shape).hlo
    formats = dict(re.findall(r"%([\w.-]+) = (\w+)\[", text))
    products = re.findall(r" convolution\(%([\w.-]+), %([\w.-]+)\)", text)
    assert len(products) == 2
    for operands in products:
        assert {formats[name] for name in operands} == {"f8e4m3fn", "f8e5m2"}
