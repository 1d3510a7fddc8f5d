"""Tokens are drawn from the distribution that temperature, top-k and top-p describe."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.models.generation import Sampling
from tpukit.models.generation.decoding import keep_likeliest

LOGITS = np.log(np.asarray([0.4, 0.3, 0.15, 0.1, 0.05]))


def drawn(sampling, draws=4000):
    keys = jax.random.split(jax.random.key(3), draws)
    tokens = sampling.choose(jnp.tile(jnp.asarray(LOGITS, jnp.float32), (draws, 1)), keys)
    return np.bincount(np.asarray(tokens), minlength=len(LOGITS)) / draws


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (Sampling(temperature=0), [1, 0, 0, 0, 0]),
        (Sampling(temperature=0.5), np.square([0.4, 0.3, 0.15, 0.1, 0.05]) / 0.285),
        (Sampling(top_k=2), [4 / 7, 3 / 7, 0, 0, 0]),
        (Sampling(top_p=0.69), [4 / 7, 3 / 7, 0, 0, 0]),
        (Sampling(top_p=0.71), [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        (Sampling(top_p=1e-6), [1, 0, 0, 0, 0]),
        (Sampling(top_k=3, top_p=0.5), [4 / 7, 3 / 7, 0, 0, 0]),
    ],
)
def test_shares_of_drawn_tokens(sampling, expected):
    np.testing.assert_allclose(drawn(sampling), expected, atol=0.025)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=8, max_size=8, unique=True),
    st.integers(1, 10),
    st.floats(0.05, 0.99),
)
def test_kept_tokens_are_those_of_a_plain_loop(whole, top_k, top_p):
    logits = np.asarray(whole, np.float64) / 8
    order = np.argsort(-logits)[:top_k]
    shares = np.exp(logits[order]) / np.exp(logits[order]).sum()
    kept, total = set(), 0.0
    for token, share in zip(order, shares, strict=True):
        if abs(total - top_p) < 1e-5:
            return  # a tie that rounding decides
        if total < top_p:
            kept.add(int(token))
        total += share
    found = keep_likeliest(jnp.asarray(logits, jnp.float32), top_k=top_k, top_p=top_p)
    assert set(np.flatnonzero(np.isfinite(np.asarray(found)))) == kept
