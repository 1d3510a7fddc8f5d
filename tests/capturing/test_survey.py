"""Programs are told apart by what they do to their arguments, whatever they are called."""

import jax
import jax.numpy as jnp
import pytest
from recorded_programs import recorded
from recorded_programs import survey as shim_survey

parameters_of, survey, updates_of = (
    shim_survey.parameters_of,
    shim_survey.survey,
    shim_survey.updates_of,
)
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


def layers_under(wrap):
    """The gradients of two scanned layers of two matmuls and of one more, each under `wrap`."""

    def loss(w, x):
        def layer(x, one):
            return jax.nn.gelu(jnp.tanh(x @ one[0]) @ one[1]) + x, None

        x, _ = jax.lax.scan(wrap(layer), x, w)
        return (wrap(lambda x: jnp.tanh(x @ w[0, 0]))(x) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize(
    ("wrap", "again"),
    [
        (jax.checkpoint, True),
        (lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable), False),
        (lambda f: jax.checkpoint(jax.checkpoint(f)), True),
        (lambda f: jax.checkpoint(jax.jit(f), prevent_cse=False), True),
    ],
    ids=["full", "dots are kept", "nested", "jitted inside"],
)
def test_model_flops_are_those_of_the_program_without_checkpoint(wrap, again):
    weights, x = jnp.zeros((2, 2, 64, 64)), jnp.zeros((32, 64))
    plain = survey(layers_under(lambda f: f).trace(weights, x).jaxpr.jaxpr, {})
    found = survey(layers_under(wrap).trace(weights, x).jaxpr.jaxpr, {})
    assert plain.model_flops == plain.flops
    assert (plain.remats, found.remats > 0) == (0, True)
    assert found.model_flops == plain.flops
    assert found.flops == plain.flops + found.recomputed_flops
    assert (found.recomputed_flops > 0) == again


def test_one_branch_runs_and_a_loop_of_unknown_length_is_open():
    def branch(w, x, n):
        x = jax.lax.cond(n > 0, lambda: x @ w @ w, lambda: x @ w)
        return jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] @ w), (0, x))

    found = survey(jax.jit(branch).trace(jnp.zeros((64, 64)), jnp.zeros((32, 64)), 3).jaxpr, {})
    once = 2 * 32 * 64 * 64
    assert (found.flops, found.open_flops, found.open_loops) == (3 * once, once, 1)


def test_blocks_of_kernels_are_known():
    from jax.experimental import pallas as pl

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def doubled(x):
        block = pl.BlockSpec((None, 128, 256), lambda i, j: (i, j, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            kernel, shape, grid=(2, 4), in_specs=[block], out_specs=block, name="doubling"
        )(x)

    found = survey(jax.jit(doubled).trace(jnp.zeros((2, 512, 256))).jaxpr.jaxpr, {})
    assert found.kernels == {"doubling": 1}
    assert found.blocks == {"doubling": {"grid": [2, 4], "blocks": [[1, 128, 256]] * 2}}


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
