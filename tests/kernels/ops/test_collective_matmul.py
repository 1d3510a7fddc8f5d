"""A collective matmul is the plain product, made of steps around a ring."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tpukit.errors import MeshError, ShardingError
from tpukit.kernels.ops.gemm import adaptive_matmul


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def place(mesh, rows=24):
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.normal(size=(rows, 16)), jnp.float32)
    b = jnp.asarray(rng.normal(size=(16, 32)), jnp.float32)
    return (
        jax.device_put(a, NamedSharding(mesh, P("model"))),
        jax.device_put(b, NamedSharding(mesh, P(None, "model"))),
    )


def compiled(function, *arrays):
    def step(*arrays):
        out, pull = jax.vjp(function, *arrays)
        return out, *pull(jnp.cos(out))

    lowered = jax.jit(step).lower(*arrays).compile()
    return lowered(*arrays), lowered.as_text()


@pytest.mark.parametrize("rows", [24, 4])
def test_it_is_the_plain_product_with_its_gradients(mesh, rows):
    arrays = place(mesh, rows)

    def collective(a, b):
        return adaptive_matmul(
            a, b, precision="highest", tpu_strategy="collective", mesh=mesh, axis="model"
        )

    seen, text = compiled(collective, *arrays)
    expected, _ = compiled(lambda a, b: adaptive_matmul(a, b, precision="highest"), *arrays)
    for one, other in zip(seen, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert seen[0].sharding.spec == P(None, "model")
    permutes = len(re.findall(r"collective-permute(?:-start)?\(", text))
    # Three steps of the ring, half of the rows each way, and the way back for the gradient.
    assert permutes >= (6 if rows == 24 else 3)
    assert "all-gather" not in text


def test_the_mesh_in_use_is_taken(mesh):
    a, b = place(mesh)
    with jax.set_mesh(mesh):
        out = jax.jit(lambda a, b: adaptive_matmul(a, b, tpu_strategy="collective", axis="model"))(
            a, b
        )
    np.testing.assert_allclose(out, np.asarray(a) @ np.asarray(b), rtol=1e-5, atol=1e-5)


def test_without_a_mesh_that_of_an_operand_or_the_devices_here_are_taken(mesh):
    a, b = place(mesh)
    expected = np.asarray(a) @ np.asarray(b)
    alone = [jnp.asarray(np.asarray(operand)) for operand in (a, b)]
    for operands, ways in (((a, b), 4), (alone, 8)):
        out = adaptive_matmul(*operands, precision="highest", tpu_strategy="collective")
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
        assert out.sharding.mesh.shape["model"] == ways


def test_devices_that_cannot_share_evenly_are_left_out():
    a, b = jnp.ones((6, 4)), jnp.ones((4, 9))
    out = adaptive_matmul(a, b, tpu_strategy="collective")
    assert out.sharding.mesh.size == 3
    np.testing.assert_allclose(out, np.full((6, 9), 4.0))


def test_what_is_wrong_is_said(mesh):
    a, b = place(mesh)

    def call(a, b, **options):
        return adaptive_matmul(a, b, tpu_strategy="collective", **options)

    with pytest.raises(MeshError, match="Did you mean 'model'"):
        call(a, b, mesh=mesh, axis="modle")
    with pytest.raises(ShardingError, match=r"22 rows of a cannot be split.*pad them to 24"):
        call(a[:22], b, mesh=mesh, axis="model")
