"""Gating is what numpy computes: choices, queues, weights, losses and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.errors import TPUKernelError, TPUValidationError
from tpukit.kernels.ops.grouped_matmul.api import grouped_matmul
from tpukit.kernels.ops.moe_gating import ExpertGroups, moe_gating


def logits_of(tokens=300, experts=10, seed=0, ties=False):
    logits = np.random.default_rng(seed).normal(size=(tokens, experts))
    return jnp.asarray(np.round(logits) if ties else logits, jnp.float32)


def by_numpy(logits, k, *, normalize=True, score="softmax", capacity=None, bias=0.0):
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    normaliser = np.exp(logits - top).sum(-1, keepdims=True)
    scores = np.exp(logits - top) / normaliser
    if score == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    experts = np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :k]
    position, queues = np.zeros_like(experts), np.zeros(logits.shape[1], int)
    for token, chosen in enumerate(experts):
        position[token] = queues[chosen]
        queues[chosen] += 1
    weights = np.take_along_axis(scores, experts, -1)
    weights = weights / weights.sum(-1, keepdims=True) if normalize else weights
    kept = position < capacity if capacity is not None else np.ones_like(experts, bool)
    shares = (scores / scores.sum(-1, keepdims=True)).mean(0)
    balance = len(queues) * (queues / queues.sum() * shares).sum()
    z_loss = ((top + np.log(normaliser)) ** 2).mean()
    return experts, np.where(kept, weights, 0), position, kept, queues, balance, z_loss


def assert_same(seen, expected):
    for name, one, other in zip(seen._fields, seen, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-7, err_msg=name)


@functools.cache
def gate(**options):
    return jax.jit(functools.partial(moe_gating, **options))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_it_is_numpys(score):
    bias = jnp.linspace(-0.1, 0.1, 10)
    seen = gate(k=3, score=score, capacity_factor=0.8)(logits_of(), bias)
    capacity = int(np.ceil(300 * 3 * 0.8 / 10))
    expected = by_numpy(logits_of(), 3, score=score, capacity=capacity, bias=np.asarray(bias))
    assert not expected[3].all()
    assert_same(seen, expected)


@pytest.mark.parametrize("top", [1, 2])
def test_experts_of_the_best_groups_alone_are_chosen(top):
    logits, bias = logits_of(experts=12), np.linspace(-0.5, 0.5, 12, dtype=np.float32)
    scales = np.linspace(0.5, 2, 12, dtype=np.float32)
    seen = gate(k=4, score="sigmoid", groups=ExpertGroups(4, 2, top), weight_scale=2.5)(
        logits, jnp.asarray(bias), expert_scale=jnp.asarray(scales)
    )
    scores = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    for token, one in enumerate(scores + bias):
        worth = [sum(sorted(group)[-top:]) for group in one.reshape(4, 3)]
        best_groups = sorted(range(4), key=lambda group: -worth[group])[:2]
        standing = [expert for expert in range(12) if expert // 3 in best_groups]
        chosen = sorted(standing, key=lambda expert: -one[expert])[:4]
        np.testing.assert_array_equal(seen.experts[token], chosen)
        weights = scores[token][chosen] / scores[token][chosen].sum() * scales[chosen] * 2.5
        np.testing.assert_allclose(seen.weights[token], weights, rtol=2e-6)
    counts = np.bincount(seen.experts.flatten(), minlength=12)
    np.testing.assert_array_equal(seen.expert_tokens, counts)


@settings(max_examples=3, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.data())
def test_any_shape_and_ties(tokens, experts, data):
    k = data.draw(st.integers(1, min(experts, 8)))
    logits = logits_of(tokens, experts, ties=True)
    assert_same(gate(k=k)(logits), by_numpy(logits, k))


def test_gradients_are_finite_differences_of_a_fixed_choice():
    logits = logits_of(tokens=6, experts=5)
    fixed = gate(k=2, capacity_factor=1.0)(logits)
    mixing = jnp.cos(jnp.arange(12.0).reshape(6, 2))

    def objective(logits):
        gating = moe_gating(logits, k=2, capacity_factor=1.0)
        return (gating.weights * mixing).sum() + 3 * gating.balance_loss + 0.1 * gating.z_loss

    def by_hand(logits):
        top = logits - logits.max(-1, keepdims=True)
        scores = np.exp(top) / np.exp(top).sum(-1, keepdims=True)
        weights = np.take_along_axis(scores, np.asarray(fixed.experts), -1)
        weights = np.where(fixed.kept, weights / weights.sum(-1, keepdims=True), 0)
        counts = np.asarray(fixed.expert_tokens)
        balance = 5 * (counts / 12 * scores.mean(0)).sum()
        z_loss = (np.log(np.exp(logits).sum(-1)) ** 2).mean()
        return (weights * np.asarray(mixing, np.float64)).sum() + 3 * balance + 0.1 * z_loss

    at = np.asarray(logits, np.float64)
    expected = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[place] = 1e-5
        expected[place] = (by_hand(at + step) - by_hand(at - step)) / 2e-5
    np.testing.assert_allclose(jax.jit(jax.grad(objective))(logits), expected, atol=3e-6)


def test_positions_are_where_rows_go_for_a_grouped_matmul():
    tokens, experts, k = 20, 4, 2
    gating = gate(k=k)(logits_of(tokens, experts))
    rng = np.random.default_rng(1)
    x, weights = rng.normal(size=(tokens, 6)), rng.normal(size=(experts, 6, 5))
    starts = jnp.cumsum(gating.expert_tokens) - gating.expert_tokens
    place = starts[gating.experts] + gating.position
    rows = jnp.zeros((tokens * k, 6)).at[place].set(jnp.asarray(x, jnp.float32)[:, None])
    out = grouped_matmul(rows, jnp.asarray(weights, jnp.float32), gating.expert_tokens)[place]
    seen = (out * gating.weights[..., None]).sum(1)
    each = np.einsum("td,tkdf->tkf", x, weights[np.asarray(gating.experts)])
    expected = (each * np.asarray(gating.weights)[..., None]).sum(1)
    np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-5)


def test_what_is_wrong_is_said():
    logits = logits_of()
    with pytest.raises(TPUKernelError, match=r"expected \(tokens, experts\) and \(experts,\)"):
        moe_gating(logits, jnp.zeros(3), k=2)
    with pytest.raises(TPUValidationError, match="Did you mean 'softmax'"):
        moe_gating(logits, k=2, score="softmx")
    with pytest.raises(TPUValidationError, match=r"k=11 .* 10 experts"):
        moe_gating(logits, k=11)
