"""`enable_gradient_checkpointing` on models of every kind: same numbers, less remembered."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from tpukit.errors import TPUModelError
from tpukit.models.presets import get_preset
from tpukit.models.remat.gradient_checkpointing import (
    enable_gradient_checkpointing,
    saved_residual_bytes,
)
from tpukit.models.transformer.model import Transformer

WIDTH = 16
X = jnp.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Tower(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class LinenTower(linen.Module):
    width: int = WIDTH

    @linen.compact
    def __call__(self, x):
        for _ in range(3):
            x = x + linen.Dense(self.width)(jnp.tanh(linen.Dense(4 * self.width)(x)))
        return x


def nnx_loss(model):
    definition, state = nnx.split(model)
    return lambda state: jnp.sum(nnx.merge(definition, state)(X) ** 2), state


def assert_same(tree, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), tree, other)


@pytest.fixture(scope="module")
def tower():
    return Tower(nnx.Rngs(0))


@pytest.mark.parametrize("every", [1, 2])
def test_nnx_list_of_layers(tower, every):
    checkpointed = enable_gradient_checkpointing(tower, checkpoint_every_n_layers=every)
    plain_loss, state = nnx_loss(tower)
    loss, same_state = nnx_loss(checkpointed)
    assert jax.tree.structure(nnx.to_pure_dict(state)) == jax.tree.structure(
        nnx.to_pure_dict(same_state)
    ), "names of parameters must not change"
    expected = jax.jit(jax.grad(plain_loss))(state)
    gradients = jax.jit(jax.grad(loss))(same_state)
    assert_same(nnx.to_pure_dict(gradients), nnx.to_pure_dict(expected))
    fewer = saved_residual_bytes(plain_loss, state) - saved_residual_bytes(loss, same_state)
    assert fewer > 0
    assert type(tower.layers) is nnx.List, "the model given is left as it was"


def test_longer_segments_keep_less(tower):
    sizes = [
        saved_residual_bytes(*nnx_loss(enable_gradient_checkpointing(tower, every)))
        for every in (1, 2, 3)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[2]


def test_nnx_sequential():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=rngs), jnp.tanh, Block(rngs))
    checkpointed = enable_gradient_checkpointing(model, checkpoint_policy="nothing_saveable")
    np.testing.assert_allclose(checkpointed(X), model(X), rtol=1e-6)


def test_the_reference_transformer():
    model = nnx.eval_shape(lambda: Transformer(get_preset("tiny"), rngs=nnx.Rngs(0)))
    checkpointed = enable_gradient_checkpointing(model, 2, "minimal")
    assert str(checkpointed.execution.remat) == "minimal every=2"
    assert not model.execution.remat.active


def test_linen():
    model = LinenTower()
    checkpointed = enable_gradient_checkpointing(model)
    variables = model.init(jax.random.key(0), X)

    def loss(model):
        return lambda variables: jnp.sum(model.apply(variables, X) ** 2)

    assert_same(
        jax.jit(jax.grad(loss(checkpointed)))(variables), jax.jit(jax.grad(loss(model)))(variables)
    )
    assert saved_residual_bytes(loss(checkpointed), variables) < saved_residual_bytes(
        loss(model), variables
    )


def test_plain_function():
    def function(x):
        return jnp.sum(jnp.tanh(jnp.sin(x)) ** 2)

    checkpointed = enable_gradient_checkpointing(function)
    np.testing.assert_allclose(jax.grad(checkpointed)(X), jax.grad(function)(X), rtol=1e-6)
    assert saved_residual_bytes(checkpointed, X) < saved_residual_bytes(function, X)


def test_equinox():
    model = equinox.nn.MLP(WIDTH, WIDTH, 64, 2, activation=jnp.tanh, key=jax.random.key(0))
    checkpointed = enable_gradient_checkpointing(model)

    def loss(model):
        return jnp.sum(jax.vmap(model)(X) ** 2)

    gradients, expected = (equinox.filter_grad(loss)(one) for one in (checkpointed, model))
    assert_same(jax.tree.leaves(gradients), jax.tree.leaves(expected))
    sizes: list[int] = []
    for one in (checkpointed, model):
        arrays, rest = equinox.partition(one, equinox.is_array)
        sizes.append(
            saved_residual_bytes(lambda p, rest=rest: loss(equinox.combine(p, rest)), arrays)
        )
    assert sizes[0] < sizes[1]


def test_a_pair_of_functions():
    def apply(params, batch):
        return jnp.sum(jnp.tanh(jnp.sin(batch["x"] * params)) ** 2)

    init, checkpointed = enable_gradient_checkpointing((jnp.zeros_like, apply))
    assert init is jnp.zeros_like
    batch = {"x": X}
    assert_same(jax.grad(checkpointed)(2.0, batch), jax.grad(apply)(2.0, batch))


@pytest.mark.parametrize(
    ("model", "every", "message"),
    [
        ("tiny", 1, "has no function to checkpoint.*remat='nothing_saveable'"),
        (3, 1, "int is not a supported model"),
    ],
)
def test_errors_teach(model, every, message):
    with pytest.raises(TPUModelError, match=message):
        enable_gradient_checkpointing(model, every)
