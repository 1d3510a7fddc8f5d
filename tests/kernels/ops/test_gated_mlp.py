"""The gated feed-forward block against float64, forward and gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUKernelError
from tpukit.kernels.ops.gated_mlp import ACTIVATIONS, gated_mlp

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}


def draw(rows, width, hidden, dtype):
    rng = np.random.default_rng(0)
    shapes = [(rows, width), (width, hidden), (width, hidden), (hidden, width), (rows, width)]
    return [jnp.asarray(rng.normal(size=s) / np.sqrt(s[0]), dtype) for s in shapes]


def truth(x, w_gate, w_up, w_down, cotangent):
    """Result and gradients for silu in float64, the derivative written out."""
    x, w_gate, w_up, w_down, g = (
        np.asarray(a, np.float64) for a in (x, w_gate, w_up, w_down, cotangent)
    )
    gate, up = x @ w_gate, x @ w_up
    sigmoid = 1 / (1 + np.exp(-gate))
    act, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    hidden, d_hidden = act * up, g @ w_down.T
    d_gate, d_up = d_hidden * up * slope, d_hidden * act
    dx = d_gate @ w_gate.T + d_up @ w_up.T
    return hidden @ w_down, dx, x.T @ d_gate, x.T @ d_up, hidden.T @ g


def near(found, wanted, dtype):
    error = np.abs(np.asarray(found, np.float64) - wanted).max()
    assert error <= TOLERANCE[dtype] * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("sizes", "dtype"), [((40, 256, 256), "bfloat16"), ((24, 72, 130), "float32")]
)
def test_it_is_the_definition(sizes, dtype):
    *arrays, cotangent = draw(*sizes, dtype)

    @jax.jit
    def run(arrays, cotangent):
        out, pull = jax.vjp(gated_mlp, *arrays)
        return out, *pull(cotangent)

    wanted = truth(*arrays, cotangent)
    for found, expected in zip(run(arrays, cotangent), wanted, strict=True):
        near(found, expected, dtype)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_other_activations_and_their_gradients(activation):
    *arrays, cotangent = draw(16, 128, 128, "float32")

    def definition(x, w_gate, w_up, w_down):
        return (ACTIVATIONS[activation](x @ w_gate) * (x @ w_up)) @ w_down

    results = []
    for function in (partial(gated_mlp, activation=activation), definition):
        out, pull = jax.vjp(function, *arrays)
        results.append((out, *pull(cotangent)))
    for found, expected in zip(*results, strict=True):
        near(found, np.asarray(expected, np.float64), "float32")


def test_any_leading_shape():
    x, w_gate, w_up, w_down, _ = draw(12, 128, 128, "float32")
    wanted = truth(x, w_gate, w_up, w_down, x)[0]
    found = jax.jit(gated_mlp)(x.reshape(3, 4, 128), w_gate, w_up, w_down)
    near(found.reshape(12, 128), wanted, "float32")


def test_shapes_and_activations_are_checked():
    x, w_gate, w_up, w_down, _ = draw(8, 128, 128, "float32")
    with pytest.raises(TPUKernelError, match=r"got \(128, 127\), \(128, 128\) and \(128, 128\)"):
        gated_mlp(x, w_gate[:, :-1], w_up, w_down)
    with pytest.raises(TPUKernelError, match="Did you mean 'gelu'"):
        gated_mlp(x, w_gate, w_up, w_down, activation="gleu")
