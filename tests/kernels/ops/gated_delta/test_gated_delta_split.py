"""Cut anywhere along tokens, or split over devices along sequences and heads: the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpukit.kernels import (
    gated_delta,
    gated_delta_step,
    short_convolution,
    short_convolution_step,
)

B, S, HK, HV, D, E, TAPS = 2, 40, 2, 4, 8, 12, 4


def arrays(seed=0, batch=B, key_heads=HK, value_heads=HV):
    draw = np.random.default_rng(seed).standard_normal
    q, k = (draw((batch, S, key_heads, D)) for _ in range(2))
    v = draw((batch, S, value_heads, E))
    rates = batch, S, value_heads
    g, beta = -np.exp(2 * draw(rates) - 2), 1 / (1 + np.exp(-draw(rates)))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta))


rule = jax.jit(gated_delta, static_argnames="chunk")
convolve = jax.jit(short_convolution)


# A cut is a shape, and every shape is compiled: few of them, and any values.
@given(cut=st.sampled_from([1, 16, 31]), seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_two_calls_through_the_state_are_one(cut, seed):
    whole = arrays(seed)
    # The document goes on across the cut: a call cannot know what was before it.
    ids = jnp.broadcast_to(jnp.searchsorted(jnp.asarray([5, 30]), jnp.arange(S)), (B, S))
    ids = jnp.where(jnp.arange(S) == cut, jnp.roll(ids, 1, axis=1), ids)
    wanted, wanted_state = rule(*whole, segment_ids=ids)
    first, state = rule(*(x[:, :cut] for x in whole), segment_ids=ids[:, :cut])
    second, state = rule(
        *(x[:, cut:] for x in whole),
        initial_state=state,
        segment_ids=ids[:, cut:],
    )
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), wanted, atol=1e-5)
    np.testing.assert_allclose(state, wanted_state, atol=1e-5)
    x = whole[2].reshape(B, S, -1)
    weight = jnp.cos(jnp.arange(HV * E * TAPS)).reshape(-1, TAPS)
    wanted, wanted_state = convolve(x, weight, segment_ids=ids)
    first, state = convolve(x[:, :cut], weight, segment_ids=ids[:, :cut])
    second, state = convolve(x[:, cut:], weight, initial_state=state, segment_ids=ids[:, cut:])
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), wanted, atol=1e-6)
    np.testing.assert_array_equal(state, wanted_state)


def test_decoding_goes_on_where_a_prompt_ends():
    """Prompt and tokens of a layer, convolution included, as generation has them."""
    q, k, v, g, beta = arrays()
    weight = jnp.sin(jnp.arange(HV * E * TAPS)).reshape(-1, TAPS)
    x = v.reshape(B, S, -1)
    values, _ = short_convolution(x, weight)
    wanted, last = gated_delta(q, k, values.reshape(v.shape), g, beta)
    prompt = S - 6
    values, tail = short_convolution(x[:, :prompt], weight)
    heads = values.reshape(B, prompt, HV, E)
    _, state = gated_delta(*(y[:, :prompt] for y in (q, k)), heads, g[:, :prompt], beta[:, :prompt])
    for at in range(prompt, S):
        values, tail = short_convolution_step(x[:, at], weight, tail)
        rest = (y[:, at] for y in (q, k))
        out, state = gated_delta_step(*rest, values.reshape(B, HV, E), g[:, at], beta[:, at], state)
        np.testing.assert_allclose(out, wanted[:, at], atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


@pytest.mark.parametrize("manual", [False, True], ids=["jit", "shard_map"])
def test_sequences_and_heads_may_lie_on_eight_devices(manual):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    whole = arrays(batch=4, key_heads=4, value_heads=8)
    spec = P("data", None, "model")
    results = spec, P("data", "model")

    def total(function, *arrays):
        return sum(jnp.sin(x).sum() for x in function(*arrays))

    split = (
        jax.shard_map(rule, mesh=mesh, in_specs=spec, out_specs=results, check_vma=False)
        if manual
        else rule
    )
    both = jax.jit(lambda *x: (split(*x), jax.grad(lambda *y: total(split, *y), range(5))(*x)))
    spread = [jax.device_put(x, NamedSharding(mesh, spec)) for x in whole]
    compiled = both.lower(*spread).compile()
    assert "all-gather" not in compiled.as_text()
    found = compiled(*spread)
    wanted = rule(*whole), jax.grad(lambda *y: total(rule, *y), range(5))(*whole)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
