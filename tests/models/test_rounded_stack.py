"""Weights rounded layer by layer: the same numbers, narrow gradients, less memory on TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit import Workload, compile_for, get_preset
from tpukit.models.remat.policy import RematPolicy
from tpukit.models.transformer.layer_pattern import find_runs
from tpukit.models.transformer.layer_stack import StackedLayers, round_layer_weights, run_layers

LAYERS, WIDTH = 4, 64
BF16 = jnp.dtype("bfloat16")


def layer(parameters, x):
    y = x @ parameters["kernel"].astype(BF16) * parameters["scale"].astype(BF16)
    return x + jnp.tanh(y)


def run(layer, stacked, x, *, rounds, remat):
    opened, weights = (
        round_layer_weights(stacked, BF16) if rounds else ((lambda kept: kept), stacked)
    )
    order = ("layer",) * jax.tree.leaves(stacked)[0].shape[0]

    def one_layer(parameters, x, *_):
        return layer(opened(parameters), x), jnp.zeros(()), None

    layers = StackedLayers({"": weights}, {"layer": ""}, order, frozenset())
    return run_layers(one_layer, layers, find_runs(order), x, remat=remat)


def total(stacked, x, rounds):
    out, _ = run(layer, stacked, x, rounds=rounds, remat=RematPolicy(policy="full"))
    return jnp.sum(out.astype(jnp.float32) ** 2)


def stack(width=WIDTH, layers=LAYERS):
    kernel = jax.random.normal(jax.random.key(0), (layers, width, width)) / width**0.5
    return {"kernel": kernel, "scale": jnp.full((layers, width), 0.7)}


def test_gradients_are_those_of_rounding_by_hand():
    weights, x = stack(), jax.random.normal(jax.random.key(1), (8, WIDTH), BF16)
    ours = jax.grad(total)(weights, x, True)
    plain = jax.grad(total)(weights, x, False)
    exact = jax.grad(lambda w: jnp.sum(_by_hand(w, x.astype(jnp.float32)) ** 2))(weights)
    for name in weights:
        assert ours[name].dtype == jnp.float32
        np.testing.assert_array_equal(ours[name], plain[name])  # the same roundings, elsewhere
        error = jnp.linalg.norm(ours[name] - exact[name]) / jnp.linalg.norm(exact[name])
        assert error < 0.012  # of values with 8 bits, through all layers
    np.testing.assert_array_equal(ours["kernel"], ours["kernel"].astype(BF16))


def _by_hand(weights, x):
    for place in range(LAYERS):
        kernel = weights["kernel"][place].astype(BF16).astype(jnp.float32)
        x = x + jnp.tanh(x @ kernel * weights["scale"][place])
    return x


def test_a_layer_sees_narrow_matrices_and_everything_else_as_it_is():
    shapes = {
        "mlp": {
            "router": {"kernel": jnp.ones((2, 4, 4))},
            "experts": {"up_proj": jnp.ones((2, 3, 4, 4))},
        },
        "q_proj": {"kernel": jnp.ones((2, 4, 4)), "bias": jnp.ones((2, 4))},
        "done": {"kernel": jnp.ones((2, 4, 4), BF16)},
    }
    seen = {}

    def look(parameters, x):
        seen.update(jax.tree.map(lambda leaf: leaf.dtype.name, parameters))
        return x

    run(look, shapes, jnp.ones((1,)), rounds=True, remat=RematPolicy())
    assert seen == {
        "mlp": {"router": {"kernel": "float32"}, "experts": {"up_proj": "bfloat16"}},
        "q_proj": {"kernel": "bfloat16", "bias": "float32"},
        "done": {"kernel": "bfloat16"},
    }


def test_a_weight_that_is_not_a_number_stays_one():
    weights = stack()
    weights["kernel"] = weights["kernel"].at[1, 0, 0].set(jnp.nan)
    assert jnp.isnan(total(weights, jnp.ones((8, WIDTH), BF16), True))


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_the_compiler_needs_four_bytes_less_for_every_weight():
    width, layers = 4096, 16
    weights = jax.eval_shape(lambda: stack(width, layers))
    x = jax.ShapeDtypeStruct((256, width), BF16)

    def update(weights, x, rounds):
        gradients = jax.grad(total)(weights, x, rounds)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    needed = [
        compile_for(
            lambda weights, x, rounds=rounds: update(weights, x, rounds),
            "v6e-1",
            weights,
            x,
            donate_argnums=(0,),
            until="memory",
        ).memory.total_bytes
        for rounds in (False, True)
    ]
    assert needed[0] - needed[1] > 0.9 * 4 * layers * width * width


def test_wide_gradients_are_the_same_but_for_rounding():
    config = get_preset("tiny", dtype="bfloat16")
    batch = {"inputs": jnp.ones((1, 8), jnp.int32), "targets": jnp.ones((1, 8), jnp.int32)}

    def loss_after_a_step(config):
        work = Workload(config, batch_size=1, sequence_length=8)
        state, _ = jax.jit(work.train_step)(work.init(jax.random.key(0)), batch)
        return float(jax.jit(work.train_step)(state, batch)[1]["loss"])

    narrow, wide = map(loss_after_a_step, (config, config.replace(wide_gradients=True)))
    assert narrow == pytest.approx(wide, rel=1e-2)
