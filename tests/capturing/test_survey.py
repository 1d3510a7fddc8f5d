"""Programs are told apart by what they do to their arguments, whatever they are called."""

import sys

import jax
import jax.numpy as jnp
import pytest

from tpukit.capturing.running import SHIM

sys.path.insert(0, str(SHIM))
from tpukit_shim.programs import RecordedProgram
from tpukit_shim.survey import parameters_of, survey, updates_of

sys.path.remove(str(SHIM))

WIDTH = 256
PARAMS = {"w": jnp.zeros((WIDTH, WIDTH)), "scale": jnp.zeros((WIDTH,))}
BATCH = jnp.zeros((1024, WIDTH))


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"]) * params["scale"]) ** 2)


def frozen_loss(adapters, base, batch):
    return jnp.mean((batch @ base + batch @ adapters["a"] @ adapters["b"]) ** 2)


def train(params, moments, batch):
    grads = jax.grad(loss)(params, batch)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda p, m: p - m, params, moments), moments


def train_adapters(adapters, base, batch):
    grads = jax.grad(frozen_loss)(adapters, base, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, adapters, grads)


def train_in_branch(params, step, batch):
    grads = jax.grad(loss)(params, batch)
    update = jax.jit(lambda p, g: jax.tree.map(lambda a, b: a - b, p, g))
    return jax.lax.cond(step % 2 == 0, update, lambda p, g: p, params, grads)


def accumulate(total, params, batch):
    return jax.tree.map(jnp.add, total, jax.grad(loss)(params, batch))


def optimizer(params, moments, grads):
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda p, m: p - m, params, moments), moments


ADAPTERS = {"a": jnp.zeros((WIDTH, 8)), "b": jnp.zeros((8, WIDTH))}


def recorded(function, *args):
    traced = jax.jit(function).trace(*args)
    jaxpr = traced.jaxpr
    params = {
        "jaxpr": jaxpr,
        "name": "f",
        "in_shardings": [None] * len(jaxpr.in_avals),
        "out_shardings": [None] * len(jaxpr.out_avals),
        "donated_invars": [False] * len(jaxpr.in_avals),
    }
    return RecordedProgram(jax.tree.leaves(args), params, survey(jaxpr.jaxpr, {}))


@pytest.mark.parametrize(
    ("function", "args", "kind"),
    [
        (train, (PARAMS, PARAMS, BATCH), "training step"),
        (train_adapters, (ADAPTERS, PARAMS["w"], BATCH), "training step"),
        (train_in_branch, (PARAMS, 3, BATCH), "training step"),
        (jax.grad(loss), (PARAMS, BATCH[:512]), "gradients"),
        (loss, (PARAMS, BATCH), "other"),
        (optimizer, (PARAMS, PARAMS, PARAMS), "optimizer update"),
    ],
)
def test_kinds(function, args, kind):
    assert recorded(function, *args).kind == kind


def test_accumulated_gradients_are_no_step_of_their_own():
    assert recorded(accumulate, PARAMS, PARAMS, BATCH).kind != "training step"


def test_purposes_follow_the_data():
    program = recorded(train, PARAMS, PARAMS, BATCH)
    # scale, w of the parameters, then of the moments, then the batch
    assert program.purposes() == [
        *("parameters", "parameters", "optimizer state", "optimizer state", "batch inputs"),
    ]


def test_flops_count_loops_as_often_as_they_run():
    def looped(w, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    weights, x = jnp.zeros((5, 64, 64)), jnp.zeros((32, 64))
    found = survey(jax.jit(looped).trace(weights, x).jaxpr.jaxpr, {})
    # XLA counts a loop's body once, so the truth is five of its matmuls.
    once = jax.jit(jnp.matmul).lower(x, weights[0]).compile().cost_analysis()["flops"]
    assert found.flops == 5 * once


def test_parameters_feed_matmuls_through_casts_and_loops():
    def forward(w, bias, x):
        def layer(x, one):
            return x @ one.astype(jnp.bfloat16), None

        return jax.lax.scan(layer, x.astype(jnp.bfloat16), w)[0] + bias

    jaxpr = (
        jax.jit(forward)
        .trace(jnp.zeros((3, 64, 64)), jnp.zeros((64,)), jnp.zeros((8, 64)))
        .jaxpr.jaxpr
    )
    assert 0 in parameters_of(jaxpr, {})
    assert 1 not in parameters_of(jaxpr, {})
    assert updates_of(jaxpr, {}) == {0: set()}
