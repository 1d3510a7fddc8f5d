"""Layers of several kinds in one turn of a loop: the same gradients, one layer at work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.models.remat.policy import RematPolicy
from tpukit.models.transformer.layer_pattern import find_runs
from tpukit.models.transformer.layer_stack import StackedLayers, run_layers

ORDER = ("narrow", "narrow", "wide") * 3 + ("narrow",)
COUNTS = {"narrow": 7, "wide": 3}
WIDTHS = {"narrow": 8, "wide": 16}


def stacks():
    keys = iter(jax.random.split(jax.random.key(0), 4))
    return {
        kind: {
            "trained": jax.random.normal(next(keys), (count, 8, WIDTHS[kind])) / 4,
            "kept": jax.random.normal(next(keys), (count, WIDTHS[kind], 8)) / 4,
            "codes": jnp.ones((count, 2), jnp.int8),
        }
        for kind, count in COUNTS.items()
    }


def loss(trained, remat, scan=True):
    held = {kind: {**parts, "trained": trained[kind]} for kind, parts in stacks().items()}

    def layer(parameters, x, kind, *_):
        hidden = jnp.tanh(x @ parameters["trained"]) * parameters["codes"].sum()
        return x + hidden @ parameters["kept"], None, None

    layers = StackedLayers(held, {kind: kind for kind in COUNTS}, ORDER, frozenset())
    x = jax.random.normal(jax.random.key(1), (4, 8))
    out, _ = run_layers(
        layer, layers, find_runs(ORDER), x, remat=RematPolicy.parse(remat), scan=scan
    )
    return jnp.sum(out**2)


TRAINED = {kind: parts["trained"] for kind, parts in stacks().items()}


@pytest.mark.parametrize(("remat", "scan"), [("full", True), ("full every=2", False)])
def test_gradients_are_those_of_layers_that_remember(remat, scan):
    plain = jax.grad(loss)(TRAINED, None)
    ours = jax.jit(jax.grad(loss), static_argnums=(1, 2))(TRAINED, remat, scan)
    for kind, expected in plain.items():
        assert np.linalg.norm(ours[kind] - expected) < 1e-5 * np.linalg.norm(expected)


def barriers(jaxpr):
    """Shapes that wait for each other in the backward pass, and products in it."""
    waiting, products = [], []

    def walk(inside):
        for equation in inside.eqns:
            if equation.primitive.name == "optimization_barrier":
                waiting.append([one.aval.shape for one in equation.invars])
            if equation.primitive.name == "dot_general":
                products.append(equation.outvars[0].aval.shape)
            for part in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda one: hasattr(one, "eqns")
            ):
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns"):
                    walk(part)

    walk(jaxpr.jaxpr)
    return waiting, products


def test_each_layer_waits_for_the_gradients_of_the_one_after_it():
    waiting, products = barriers(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(TRAINED, "full"))
    # A turn of three, each with the gradient of its input and of what is trained, and no other;
    # the layer that is left over stands alone.
    assert sorted(map(sorted, waiting)) == [[(4, 8), (8, 8)]] * 2 + [[(4, 8), (8, 16)]]
    # One gradient of a matrix for each layer: those of what is kept are made nowhere.
    gradients = [sorted(shape) for shape in products if 4 not in shape]
    assert sorted(gradients) == [[8, 8]] * 3 + [[8, 16]]


def test_layers_of_one_kind_need_no_barrier():
    def alone(trained):
        def layer(parameters, x, *_):
            return x + jnp.tanh(x @ parameters), None, None

        layers = StackedLayers({"": trained}, {"narrow": ""}, ("narrow",) * 7, frozenset())
        x = jnp.ones((4, 8))
        out, _ = run_layers(
            layer, layers, find_runs(("narrow",) * 7), x, remat=RematPolicy.parse("full")
        )
        return jnp.sum(out**2)

    assert barriers(jax.make_jaxpr(jax.grad(alone))(TRAINED["narrow"]))[0] == []
