"""Every attention gives what the definition gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.models.attention import choice as attention
from tpukit.models.attention.choice import get_attention


def by_definition(q, k, v, window, segments):
    batch, length, heads, depth = q.shape
    k, v = (np.repeat(x, heads // k.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(depth)
    places = np.arange(length)
    seen = places[None, :] <= places[:, None]
    if window is not None:
        seen &= places[:, None] - places[None, :] < window
    seen = np.broadcast_to(seen, (batch, length, length))
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    scores = np.where(seen[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.fixture(scope="module")
def qkv():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, 12, heads, 8)).astype(np.float32) for heads in (4, 2, 2)]


@pytest.mark.parametrize("name", ["xla", "ring"])
@pytest.mark.parametrize("window", [None, 5, 99])
def test_windows(qkv, name, window):
    out = get_attention(name)(*map(jnp.asarray, qkv), window=window)
    np.testing.assert_allclose(out, by_definition(*qkv, window, None), atol=1e-5)


@pytest.mark.parametrize("name", ["xla", "ring"])
def test_segments(qkv, name):
    segments = np.repeat(np.arange(4), 3)[None].repeat(2, 0)
    out = get_attention(name)(*map(jnp.asarray, qkv), segment_ids=jnp.asarray(segments))
    np.testing.assert_allclose(out, by_definition(*qkv, None, segments), atol=1e-5)


def test_auto_never_holds_the_score_matrix_of_a_long_sequence(monkeypatch):
    monkeypatch.setattr(attention, "LONGEST_UNBLOCKED", 1024)
    shape = jax.ShapeDtypeStruct((1, 4096, 1, 8), jnp.float32)
    jaxpr = str(jax.make_jaxpr(get_attention("auto"))(shape, shape, shape))
    assert "4096,4096" not in jaxpr
    assert "4096,4096" in str(jax.make_jaxpr(get_attention("xla"))(shape, shape, shape))


def test_a_function_is_taken_as_it_is():
    def mine(q, k, v, *, window=None, segment_ids=None):
        return v

    assert get_attention(mine) is mine
