"""The short convolution against transformers' own functions, and its documents and steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tpukit.errors import TPUKernelError
from tpukit.kernels import short_convolution, short_convolution_step


def problem(*, batch=2, tokens=11, channels=6, taps=4):
    draw = np.random.default_rng(0).standard_normal
    shapes = (batch, tokens, channels), (channels, taps), (batch, taps - 1, channels)
    return tuple(np.asarray(draw(shape), np.float32) for shape in shapes)


def from_torch(x):
    return x.transpose(1, 2).numpy()


@pytest.mark.parametrize("activation", ["silu", None])
def test_it_is_transformers_convolution(activation):
    x, weight, state = problem()
    tokens = torch.from_numpy(x).transpose(1, 2)
    filters = torch.from_numpy(weight)
    wanted = qwen3_next.causal_conv1d_fn(tokens, filters, activation=activation)
    found, _ = short_convolution(x, weight, activation=activation)
    np.testing.assert_allclose(found, from_torch(wanted), atol=1e-6)

    kept = torch.from_numpy(state).transpose(1, 2).clone()
    wanted = qwen3_next.causal_conv1d_update(tokens, kept, filters, activation=activation)
    found, last = short_convolution(x, weight, initial_state=state, activation=activation)
    np.testing.assert_allclose(found, from_torch(wanted), atol=1e-6)
    np.testing.assert_array_equal(last, from_torch(kept))


@pytest.mark.parametrize("tokens", [1, 2, 11])
def test_steps_are_the_whole(tokens):
    x, weight, state = problem(tokens=tokens)
    wanted, wanted_state = short_convolution(x, weight, initial_state=state)
    for at in range(tokens):
        out, state = short_convolution_step(x[:, at], weight, state)
        np.testing.assert_allclose(out, wanted[:, at], atol=1e-6)
    np.testing.assert_array_equal(state, wanted_state)


def test_documents_are_apart_in_results_states_and_gradients():
    x, weight, state = problem()
    ids = np.broadcast_to(np.repeat([0, 1, 2], [2, 7, 2]), x.shape[:2])
    out, last = short_convolution(x, weight, initial_state=state, segment_ids=ids)
    for first, end in ((0, 2), (2, 9), (9, 11)):
        alone = short_convolution(x[:, first:end], weight, initial_state=None if first else state)
        np.testing.assert_allclose(out[:, first:end], alone[0], atol=1e-6)
    np.testing.assert_array_equal(last, alone[1])

    def second(x):
        return short_convolution(x, weight, segment_ids=ids)[0][:, 2:9].sum()

    reached = np.abs(jax.grad(second)(jnp.asarray(x))).sum((0, 2)) > 0
    np.testing.assert_array_equal(reached, ids[0] == 1)


def test_what_does_not_go_together_is_refused():
    x, weight, state = problem()
    with pytest.raises(TPUKernelError, match="leave its middle axis out"):
        short_convolution(x, weight[:, None])
    with pytest.raises(TPUKernelError, match=r"expected \(B, K - 1, C\) = \(2, 3, 6\)"):
        short_convolution_step(x[:, 0], weight, state[:, 1:])
    with pytest.raises(TPUKernelError, match="Did you mean 'silu'"):
        short_convolution(x, weight, activation="slu")
