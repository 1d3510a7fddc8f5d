"""Routing: who goes where, who fits, and statistics that add up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.errors import TPUValidationError
from tpukit.parallel.experts.routing import (
    RouterStats,
    expert_capacity,
    route,
    router_stats,
    sort_assignments,
    update_router_bias,
    within_capacity,
)


# Eager jax compiles every operation of every shape: one compiled function and few shapes instead.
@functools.partial(jax.jit, static_argnames=("k", "normalize", "score", "capacity"))
def route_and_count(logits, bias=None, *, k, normalize=True, score="softmax", capacity=None):
    routing = route(logits, k, normalize=normalize, score=score, bias=bias)
    if capacity is None:
        return routing, None, router_stats(routing)
    assignments = sort_assignments(routing.experts, logits.shape[-1])
    kept = within_capacity(routing.experts, assignments, capacity)
    return routing, kept, router_stats(routing, kept=kept)


def logits_of(tokens, experts, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(tokens, experts)), jnp.float32)


TOKENS, EXPERTS, K = 7, 4, 2


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 99), st.sampled_from(["softmax", "sigmoid"]), st.booleans())
def test_every_token_gets_its_k_best_experts(seed, score, normalize):
    logits = logits_of(TOKENS, EXPERTS, seed)
    routing, _, _ = route_and_count(logits, k=K, score=score, normalize=normalize)
    # Both scores rise with the logit, so the best k are the k largest logits.
    best = np.argsort(-np.asarray(logits), axis=-1, kind="stable")[:, :K]
    np.testing.assert_array_equal(routing.experts, best)
    np.testing.assert_allclose(np.sum(routing.probabilities, -1), 1, rtol=1e-5)
    if normalize:
        np.testing.assert_allclose(np.sum(routing.weights, -1), 1, rtol=1e-5)
    assert (np.asarray(routing.weights) > 0).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 99), st.sampled_from([0.5, 1.0, 8.0]))
def test_capacity_is_never_exceeded_and_earlier_tokens_win(seed, factor):
    capacity = expert_capacity(TOKENS, num_experts=EXPERTS, k=K, capacity_factor=factor)
    routing, kept, stats = route_and_count(logits_of(TOKENS, EXPERTS, seed), k=K, capacity=capacity)
    kept, stats = np.asarray(kept), jax.tree.map(np.asarray, stats)
    room = [capacity] * EXPERTS
    for token, choices in enumerate(np.asarray(routing.experts)):
        for choice, expert in enumerate(choices):
            assert kept[token, choice] == (room[expert] > 0)
            room[expert] -= 1
    assert float(stats.expert_tokens.sum()) == TOKENS * K
    assert float(stats.tokens) == TOKENS
    assert float(stats.dropped_tokens.sum()) == (~kept).sum()
    assert (stats.expert_tokens - stats.dropped_tokens <= capacity).all()


def test_sorting_keeps_token_order_inside_an_expert():
    experts = jnp.asarray([[2, 0], [0, 1], [2, 1]])
    assignments = sort_assignments(experts, 3)
    np.testing.assert_array_equal(assignments.order, [1, 2, 3, 5, 0, 4])
    np.testing.assert_array_equal(assignments.counts, [2, 2, 2])
    np.testing.assert_array_equal(assignments.order[assignments.place], np.arange(6))


def test_statistics_against_their_definitions():
    logits = logits_of(20, 5)
    _, _, stats = route_and_count(logits, k=2)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-np.asarray(logits), axis=-1)[:, :2]
    fraction = np.bincount(chosen.reshape(-1), minlength=5) / 40
    np.testing.assert_allclose(stats.balance_loss, 5 * (fraction * p.mean(0)).sum(), rtol=1e-5)
    np.testing.assert_allclose(
        stats.z_loss, (np.log(np.exp(logits).sum(-1)) ** 2).mean(), rtol=1e-5
    )
    np.testing.assert_allclose(stats.entropy, -(p * np.log(p)).sum(-1).mean(), rtol=1e-5)
    assert stats.dropped_fraction == 0


def test_statistics_of_even_and_of_collapsed_routers():
    _, _, even = route_and_count(jnp.tile(jnp.eye(4) * 3, (2, 1)), k=1)
    assert float(even.balance_loss) == pytest.approx(1)
    assert float(even.imbalance) == pytest.approx(1)
    _, _, collapsed = route_and_count(jnp.zeros((8, 4)).at[:, 0].set(50), k=1)
    assert float(collapsed.balance_loss) == pytest.approx(4)
    assert float(collapsed.imbalance) == pytest.approx(4)


def test_statistics_add_up_over_layers():
    layers = [route_and_count(logits_of(7, 4, seed), k=2)[2] for seed in range(3)]
    total = sum(layers, RouterStats.zeros(4))
    assert float(total.routers) == 3
    assert float(total.expert_tokens.sum()) == 3 * 7 * 2
    assert float(total.balance_loss) == pytest.approx(
        np.mean([float(layer.balance_loss) for layer in layers]), rel=1e-5
    )
    figures = total.to_dict()
    assert figures["tokens"] == 21
    assert "21 tokens" in total.__rich__().title
    # A pytree: it passes through jit and grad as an auxiliary output.
    assert jax.jit(lambda stats: stats + stats)(total).routers == 6


def test_a_bias_changes_who_is_chosen_and_not_how_much_they_count():
    logits = logits_of(16, 4)
    biased, _, _ = route_and_count(logits, jnp.asarray([9.0, 0, 0, 0]), k=2, normalize=False)
    assert (np.asarray(biased.experts[:, 0]) == 0).all()
    np.testing.assert_allclose(biased.weights[:, 0], jax.nn.softmax(logits)[:, 0], rtol=1e-6)


def test_bias_updates_even_out_a_skewed_router():
    logits = logits_of(256, 4) + jnp.asarray([1.0, 0, 0, 0])
    bias = jnp.zeros(4)

    @jax.jit
    def step(bias):
        stats = router_stats(route(logits, 1, bias=bias))
        return update_router_bias(bias, stats.expert_tokens, rate=0.01), stats.imbalance

    _, before = step(bias)
    for _ in range(40):
        bias, after = step(bias)
    assert before > 1.6
    assert after < 1.15


def test_errors_name_what_would_work():
    with pytest.raises(TPUValidationError, match=r"k=5 .* 4 experts; k must be between 1 and 4"):
        route(logits_of(2, 4), 5)
    with pytest.raises(TPUValidationError, match=r"'sofmax' is unknown.*Did you mean 'softmax'"):
        route(logits_of(2, 4), 1, score="sofmax")
    with pytest.raises(TPUValidationError, match=r"capacity_factor=0 must be positive"):
        expert_capacity(8, num_experts=4, k=1, capacity_factor=0)
