"""Every attention gives what the definition gives."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUModelError
from tpukit.models.attention import choice as attention
from tpukit.models.attention.choice import get_attention


def by_definition(
    q, k, v, *, window=None, chunk=None, segments=None, scale=None, soft_cap=None, sinks=None
):
    """Attention in float64, from what its options are said to mean."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, length, heads, depth = q.shape
    k, v = (np.repeat(x, heads // k.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * (depth**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    places = np.arange(length)
    seen = places[None, :] <= places[:, None]
    if window is not None:
        seen &= places[:, None] - places[None, :] < window
    if chunk is not None:
        seen &= places[:, None] // chunk == places[None, :] // chunk
    seen = np.broadcast_to(seen, (batch, length, length))
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    weights = np.where(seen[:, None], np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, np.float64))[:, None, None]
    return np.einsum("bhqk,bkhd->bqhd", weights / total, v)


@pytest.fixture(scope="module")
def qkv():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, 12, heads, 8)).astype(np.float32) for heads in (4, 2, 2)]


@pytest.mark.parametrize("name", ["xla", "ring"])
@pytest.mark.parametrize("window", [None, 5, 99])
def test_windows(qkv, name, window):
    out = get_attention(name)(*map(jnp.asarray, qkv), window=window)
    np.testing.assert_allclose(out, by_definition(*qkv, window=window), atol=1e-5)


@pytest.mark.parametrize("name", ["xla", "ring"])
def test_segments(qkv, name):
    segments = np.repeat(np.arange(4), 3)[None].repeat(2, 0)
    out = get_attention(name)(*map(jnp.asarray, qkv), segment_ids=jnp.asarray(segments))
    np.testing.assert_allclose(out, by_definition(*qkv, segments=segments), atol=1e-5)


SINKS = np.array([-1.0, 0.5, 3.0, 0.0], np.float32)
OPTIONS = {
    "chunk": {"chunk": 4},
    "chunk_with_a_rest": {"chunk": 5, "window": 3},
    "chunk_of_all": {"chunk": 99},
    "scale": {"scale": 0.7},
    "soft_cap": {"soft_cap": 1.5, "scale": 1.0},
    "sinks": {"sinks": SINKS},
    "everything": {"sinks": SINKS, "chunk": 5, "window": 4, "soft_cap": 2.0, "scale": 0.5},
}


# Of "auto", which takes "xla" here, one case: that it hands all options on.
@pytest.mark.parametrize(
    ("name", "options", "v_width"),
    [
        *((name, *rest) for name in ("xla", "ring") for rest in product(OPTIONS, (8, 5))),
        ("auto", "everything", 5),
    ],
)
def test_options(qkv, name, options, v_width):
    q, k, v = qkv[0], qkv[1], qkv[2][..., :v_width]
    segments = np.repeat(np.arange(2), 6)[None].repeat(2, 0)
    options = OPTIONS[options]
    for ids in (None, segments):
        given = {} if ids is None else {"segment_ids": jnp.asarray(ids)}
        out = get_attention(name)(*map(jnp.asarray, (q, k, v)), **options, **given)
        wanted = by_definition(q, k, v, segments=ids, **options)
        np.testing.assert_allclose(out, wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["xla", "ring"])
def test_gradients_of_all_options(qkv, name):
    """Every gradient, that of sinks included, is the slope of the definition."""
    arrays = [*qkv[:2], qkv[2][..., :5], SINKS]
    options = {"chunk": 5, "window": 4, "soft_cap": 2.0, "scale": 0.5}
    pull = np.random.default_rng(1).normal(size=(2, 12, 4, 5))

    def loss(q, k, v, sinks):
        return jnp.sum(get_attention(name)(q, k, v, sinks=sinks, **options) * pull)

    seen = jax.grad(loss, (0, 1, 2, 3))(*map(jnp.asarray, arrays))
    for at, gradient in enumerate(seen):
        direction = np.random.default_rng(at).normal(size=arrays[at].shape)

        def moved(step, at=at, direction=direction):
            shifted = [np.asarray(x, np.float64) for x in arrays]
            shifted[at] = shifted[at] + step * direction
            q, k, v, sinks = shifted
            return np.sum(by_definition(q, k, v, sinks=sinks, **options) * pull)

        slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
        assert np.sum(np.asarray(gradient, np.float64) * direction) == pytest.approx(
            slope, rel=1e-4
        )


def test_long_sequences_with_sinks_are_computed_in_rows():
    shape = jax.ShapeDtypeStruct((1, 4096, 1, 8), jnp.float32)
    sinks = jax.ShapeDtypeStruct((1,), jnp.float32)
    for name in ("auto", "xla"):
        traced = jax.make_jaxpr(lambda *a, name=name: get_attention(name)(*a[:3], sinks=a[3]))
        assert "4096,4096" not in str(traced(shape, shape, shape, sinks))


def test_cudnn_says_what_it_has_not():
    x = jnp.zeros((1, 8, 4, 8), jnp.bfloat16)
    with pytest.raises(TPUModelError, match="cuDNN has no sinks; use attention='auto'"):
        get_attention("cudnn")(x, x, x, sinks=jnp.asarray(SINKS))


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
