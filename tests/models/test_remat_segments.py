"""Checkpoints between layers of models that keep them in every way there is.

Truths: gradients of the plain model, and the bytes that segments of n layers must keep: the
parameters, and the input of each segment.
"""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from tpukit.models.remat.gradient_checkpointing import (
    enable_gradient_checkpointing,
    saved_residual_bytes,
)
from tpukit.models.remat.segments import layer_names

WIDTH, LAYERS = 8, 4
X = jnp.linspace(-1, 1, 32 * WIDTH).reshape(32, WIDTH)


def block(up, down, x):
    return x + down(jnp.sin(jnp.tanh(up(x))))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        return block(linen.Dense(4 * WIDTH), linen.Dense(WIDTH), x)


class LinenTower(linen.Module):
    @linen.compact
    def __call__(self, x, scale=1.0):
        for _ in range(LAYERS):
            x = LinenBlock()(x)
        return x * scale


class EquinoxBlock(equinox.Module):
    up: equinox.nn.Linear
    down: equinox.nn.Linear

    def __init__(self, key):
        self.up = equinox.nn.Linear(WIDTH, 4 * WIDTH, key=key)
        self.down = equinox.nn.Linear(4 * WIDTH, WIDTH, key=key)

    def __call__(self, x):
        return block(self.up, self.down, x)


class EquinoxTower(equinox.Module):
    blocks: list[EquinoxBlock]

    def __init__(self, key):
        self.blocks = [EquinoxBlock(one) for one in jax.random.split(key, LAYERS)]

    def __call__(self, x):
        for one in self.blocks:
            x = one(x)
        return x


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return block(self.up, self.down, x)


class NnxTower(nnx.Module):
    """Layers by name, not in an `nnx.List`."""

    def __init__(self, rngs):
        for number in range(LAYERS):
            setattr(self, f"block{number}", NnxBlock(rngs))

    def __call__(self, x):
        for number in range(LAYERS):
            x = getattr(self, f"block{number}")(x)
        return x


def plain_params():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [
        {"up": jax.random.normal(key, (WIDTH, 4 * WIDTH)), "down": jnp.ones((4 * WIDTH, WIDTH))}
        for key in keys
    ]


def plain_apply(params, x):
    for one in params:
        x = block(lambda h, one=one: h @ one["up"], lambda h, one=one: h @ one["down"], x)
    return x


def cast_first(params, x):
    """Mixed precision as people write it: all parameters are cast before anything runs."""
    return plain_apply(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), x)


def scanned(params, x):
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    return jax.lax.scan(lambda x, one: (plain_apply([one], x), None), x, stacked)[0]


def case(name, every):
    """(params, function of params) of a checkpointed model; every=0 for the plain one."""

    def made(model):
        return enable_gradient_checkpointing(model, every) if every else model

    if name == "linen":
        model = LinenTower()
        return model.init(jax.random.key(0), X), lambda v: made(model).apply(v, X, scale=1.0)
    if name == "equinox":
        model = EquinoxTower(jax.random.key(0))
        arrays, static = equinox.partition(model, equinox.is_array)
        return arrays, lambda a: jax.vmap(made(equinox.combine(a, static)))(X)
    if name == "nnx":
        definition, state = nnx.split(NnxTower(nnx.Rngs(0)))
        return state, lambda s: made(nnx.merge(definition, s))(X)
    apply = {
        "pair": plain_apply,
        "jit": jax.jit(plain_apply),
        "cast first": cast_first,
        "scan": scanned,
    }[name]
    _, run = made((plain_params, apply)) if every else (None, apply)
    return plain_params(), lambda p: run(p, X)


def loss_of(name, every):
    params, function = case(name, every)
    return (lambda p: jnp.sum(function(p) ** 2)), params


@pytest.mark.parametrize("name", ["linen", "equinox", "nnx", "pair", "jit", "cast first", "scan"])
def test_gradients_are_those_of_the_plain_model(name):
    (plain, params), (checkpointed, _) = loss_of(name, 0), loss_of(name, 2)
    expected = jax.jit(jax.value_and_grad(plain))(params)
    found = jax.jit(jax.value_and_grad(checkpointed))(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, expected
    )


@pytest.mark.parametrize("name", ["linen", "equinox", "nnx", "pair", "jit"])
def test_a_segment_keeps_its_input_only(name):
    kept = {every: saved_residual_bytes(*loss_of(name, every)) for every in (1, 2, LAYERS)}
    # The last bias of a segment is not needed to compute it again, so longer ones keep more.
    biases = LAYERS * WIDTH * X.itemsize
    assert kept[1] - kept[2] == pytest.approx(X.nbytes * (LAYERS - LAYERS // 2), abs=biases)
    assert kept[2] - kept[LAYERS] == pytest.approx(X.nbytes * (LAYERS // 2 - 1), abs=biases)
    assert kept[1] < saved_residual_bytes(*loss_of(name, 0))


def test_casts_are_no_layers():
    cast, plain = (saved_residual_bytes(*loss_of(name, 2)) for name in ("cast first", "pair"))
    assert cast == plain


def test_a_turn_of_a_loop_over_layers_keeps_its_input_only():
    hidden = 4 * X.nbytes
    kept, plain = (saved_residual_bytes(*loss_of("scan", every)) for every in (1, 0))
    assert plain - kept >= LAYERS * hidden


def test_every_turn_of_a_loop_over_stacked_parameters_is_a_segment():
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *plain_params())
    params = {"blocks": stacked, "head": jnp.ones((WIDTH, WIDTH))}

    def apply(params, x):
        turn = lambda x, one: (plain_apply([one], x), None)  # noqa: E731
        return jax.lax.scan(turn, x, params["blocks"])[0] @ params["head"]

    _, checkpointed = enable_gradient_checkpointing((plain_params, apply))
    loop = next(line for line in str(jax.make_jaxpr(checkpointed)(params, X)).split(" scan[")[1:])
    assert "checkpoint[" in loop or "remat2[" in loop
    np.testing.assert_allclose(
        *(jax.grad(lambda p, f=f: jnp.sum(f(p, X)))(params)["head"] for f in (apply, checkpointed)),
        rtol=1e-5,
    )


def test_layers_are_told_by_numbers_in_paths():
    tree = {"params": {"embed": {"w": 0}, "layers": [{"w1": 0, "w2": 0}, {"w1": 0}], "head": 0}}
    found = [("/".join(one.path), one.numbered) for one in layer_names(tree)]
    assert found == [
        ("embed", False),
        ("head", False),
        ("layers/0", True),
        ("layers/0", True),
        ("layers/1", True),
    ]
