"""FLOPs counted on traces, against counts by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from tpukit.kernels import flash_attention
from tpukit.parallel import create_mesh
from tpukit.step import Workload
from tpukit.step.traced_flops import model_flops, traced_flops

SQUARE = jnp.zeros((16, 16))
PRODUCT = 2 * 16**3


def flops(function, *arrays):
    return traced_flops(jax.make_jaxpr(function)(*arrays).jaxpr)


def scanned(x):
    return jax.lax.scan(lambda carry, _: (carry @ carry, None), x, length=5)[0]


def branched(x):
    return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)


def split(x):
    mesh = create_mesh(mesh_shape=(8,), axis_names=("data",))
    local = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    return local(jnp.tile(x, (8, 1)))


def convolved(x):
    kernel = jnp.zeros((3, 3, 4, 6))
    image = jnp.zeros((2, 8, 8, 4))
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=names)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x @ x, PRODUCT),
        (scanned, 5 * PRODUCT),
        (branched, 2 * PRODUCT),
        (jax.jit(lambda x: x @ x), PRODUCT),
        (jax.value_and_grad(lambda x: (x @ SQUARE).sum()), 2 * PRODUCT),
        (split, 8 * PRODUCT),
        (convolved, 2 * (2 * 8 * 8 * 6) * (3 * 3 * 4)),
    ],
)
def test_products_count_as_often_as_they_run(function, expected):
    assert flops(function, SQUARE).value == expected


def test_a_loop_without_a_length_is_a_reason():
    found = flops(lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, x), SQUARE)
    assert found.value is None
    assert "no constant length" in found.reason


def test_a_kernel_is_a_reason():
    def double(x, out):
        out[...] = x[...] * 2

    found = flops(pl.pallas_call(double, out_shape=SQUARE, interpret=True), SQUARE)
    assert found.value is None
    assert "pallas_call" in found.reason


def test_an_op_s_reference_stands_for_a_kernel_that_shows_no_products():
    q = jax.ShapeDtypeStruct((2, 32, 4, 16), jnp.float32)
    traced = jax.make_jaxpr(lambda *qkv: flash_attention(*qkv, causal=False))(q, q, q)
    assert traced_flops(traced.jaxpr).value == 2 * 2 * (2 * 4 * 32 * 32 * 16)


def test_the_flops_of_any_model_are_those_of_its_products():
    def init(rng):
        return {"table": jax.random.normal(rng, (64, 64)), "head": jax.random.normal(rng, (64, 64))}

    def apply(params, batch):
        return params["table"][batch["inputs"]] @ params["head"]

    own = model_flops(Workload((init, apply), batch_size=8, sequence_length=16))
    assert own.value == 3 * 2 * 128 * 64 * 64, "one product forward, two backward"
    tiny = Workload("tiny", batch_size=2, sequence_length=16)
    assert model_flops(tiny).value == tiny.config.flops_per_token(16).total * 32
