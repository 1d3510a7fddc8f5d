"""Products in eight-bit integers: near those of float64, on one device or many, by the compiler."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tpukit.compiler import compile_for
from tpukit.models.matmul.eight_bit import int8_matmul, int8_matmul_throughout
from tpukit.parallel import activation_rules, create_mesh


def gradients(x, matrix, weight, product=int8_matmul):
    def total(x, matrix):
        return jnp.sum(product(x, matrix).astype(jnp.float32) * weight)

    return jax.grad(total, argnums=(0, 1))(x, matrix)


def off(found, truth):
    found = np.asarray(found, np.float64)
    return np.sqrt(np.mean((found - truth) ** 2) / np.mean(truth**2))


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    x, matrix = rng.normal(size=(4, 64, 256)) * 30, rng.normal(size=(256, 64)) * 1e-3
    # As in training, most tokens' gradients are small: by a factor of e^2 either way.
    weight = rng.normal(size=(4, 64, 64)) * np.exp(2 * rng.normal(size=(4, 64, 1)))
    return x, matrix, weight


def test_products_and_gradients_are_near_those_of_float64(operands):
    x, matrix, weight = operands
    narrow = jnp.asarray(x, jnp.float32), jnp.asarray(matrix, jnp.float32)
    dx, dmatrix = gradients(*narrow, jnp.asarray(weight, jnp.float32))
    # A step is 1/127 of the largest of a row or column, here 3 to 4 deviations, and the error of
    # rounding uniform in it: 4 / 127 / sqrt(12) = 0.9 % for each operand.
    assert 0.003 < off(int8_matmul(*narrow), x @ matrix) < 0.015
    assert 0.003 < off(dx, weight @ matrix.T) < 0.015
    assert off(dmatrix, np.einsum("bsk,bsn->kn", x, weight)) < 1e-5  # not rounded


def test_throughout_means_gradients_of_weights_too(operands):
    x, _, weight = operands
    narrow = [jnp.asarray(one, jnp.float32) for one in operands]
    dx, dmatrix = gradients(*narrow, int8_matmul_throughout)
    plain_dx, _ = gradients(*narrow)
    np.testing.assert_array_equal(int8_matmul_throughout(*narrow[:2]), int8_matmul(*narrow[:2]))
    np.testing.assert_array_equal(dx, plain_dx)
    # Most gradients are small beside the largest of their column, which sets the step.
    assert 0.003 < off(dmatrix, np.einsum("bsk,bsn->kn", x, weight)) < 0.05
    text = jax.jit(gradients, static_argnums=3).lower(*narrow, int8_matmul_throughout).as_text()
    # Nobody asks for the product itself here.
    assert len(re.findall(r"dot_general.*xi8>.*xi8>", text)) == text.count("dot_general") == 2


def test_nothing_and_the_largest_are_kept():
    x = jnp.asarray([[0.0, 0.0], [3e30, -3e30]], jnp.float32)
    np.testing.assert_array_equal(int8_matmul(x * 0, jnp.eye(2)), np.zeros((2, 2)))
    np.testing.assert_allclose(int8_matmul(x, jnp.eye(2)), x, rtol=1e-6)
    zeros = gradients(x * 0, jnp.zeros((2, 2)), jnp.zeros((2, 2)))
    assert all(not np.asarray(one).any() for one in zeros)


def test_devices_exchange_narrow_weights_and_gradients(operands):
    x, matrix, weight = operands
    mesh = create_mesh(mesh_shape=(4,), axis_names=("fsdp",), devices=jax.devices()[:4])
    place = NamedSharding(mesh, PartitionSpec("fsdp"))
    arrays = [jnp.asarray(one, jnp.bfloat16) for one in (x, matrix)]
    arrays = [jax.device_put(one, place) for one in arrays]
    with activation_rules(mesh, "fsdp"):
        step = jax.jit(gradients, out_shardings=(place, place)).lower(*arrays, jnp.asarray(weight))
    compiled = step.compile()
    dx, dmatrix = compiled(*arrays, jnp.asarray(weight))
    assert off(dx, weight @ matrix.T) < 0.02
    assert off(dmatrix, np.einsum("bsk,bsn->kn", x, weight)) < 0.01
    text = compiled.as_text()
    assert re.search(r"s8\[256,64\]\S* all-gather", text)
    assert not re.search(r"bf16\[256,64\]\S* all-gather", text)
    assert not re.search(r"s32\[256,64\]\S* (?:all-reduce|reduce-scatter)", text)


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
@pytest.mark.parametrize("chip", [pytest.param("v5e", marks=pytest.mark.slow), "v6e"])
def test_the_compiler_multiplies_eight_bits(chip):
    shape = jax.ShapeDtypeStruct((8, 512, 1024), jnp.bfloat16)
    matrix = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16)

    def forward_and_backward(x, matrix):
        y, back = jax.vjp(int8_matmul, x, matrix)
        return y, *back(y)

    text = compile_for(forward_and_backward, f"{chip}-1", shape, matrix).hlo
    formats = dict(re.findall(r"%([\w.-]+) = (\w+)\[", text))
    # The compiler rounds the int32 sums to bfloat16 as they leave the matrix unit.
    products = re.findall(r" convolution\(%([\w.-]+), %([\w.-]+)\)", text)
    found = sorted(tuple(formats[name] for name in operands) for operands in products)
    assert found == [("bf16", "bf16"), ("s8", "s8"), ("s8", "s8")]
