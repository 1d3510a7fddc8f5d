"""Ring attention equals full attention, values and gradients, in every mask and layout."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh

from tpukit.errors import MeshError, ShardingError, TPUValidationError
from tpukit.kernels.ops.flash_attention.spec import AttentionSpec
from tpukit.parallel.ring.attention import ring_attention
from tpukit.parallel.ring.loop import Ring
from tpukit.parallel.ring.order import from_zigzag, local_positions, to_zigzag, zigzag_order

B, S, H, KV, D = 2, 32, 4, 2, 8
SHARDS = 4


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(SHARDS, 2), ("context", "model"))


@pytest.fixture(scope="module")
def qkv():
    random = np.random.default_rng(0)
    return tuple(
        jnp.asarray(random.normal(size=(B, S, heads, D)), jnp.float32) for heads in (H, KV, KV)
    )


@pytest.fixture(scope="module")
def segments():
    return jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (B, S)), axis=1))


def full_attention(
    q,
    k,
    v,
    sinks=None,
    *,
    causal=True,
    window=None,
    chunk=None,
    segment_ids=None,
    scale=D**-0.5,
    soft_cap=None,
):
    k, v = (jnp.repeat(x, H // KV, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    distance = np.subtract.outer(np.arange(S), np.arange(S))
    seen = jnp.ones((S, S), bool)
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= abs(distance) < window
    if chunk is not None:
        chunks = np.arange(S) // chunk
        seen &= chunks[:, None] == chunks
    if segment_ids is not None:
        seen = seen & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    weights = jnp.where(seen, jnp.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks)[:, None, None]
    return jnp.einsum("bhqk,bkhd->bqhd", weights / total, v)


def values_and_grads(attention, arrays):
    def loss(*arrays):
        out = attention(*arrays)
        return jnp.sin(out).sum(), out

    arguments = tuple(range(len(arrays)))
    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=arguments, has_aux=True))(*arrays)
    return out, *grads


@pytest.mark.parametrize(
    ("mask", "packed", "block_size"),
    [
        pytest.param({"causal": True}, False, 512, id="causal"),
        pytest.param({"causal": False}, True, 4, id="both-ways-packed"),
        pytest.param({"causal": True, "window": 5}, True, 4, id="window-packed"),
    ],
)
def test_equals_full_attention(qkv, segments, mesh, mask, packed, block_size):
    if packed:
        mask = {**mask, "segment_ids": segments}
    ours = values_and_grads(
        lambda *qkv: ring_attention(*qkv, mesh=mesh, block_size=block_size, **mask), qkv
    )
    theirs = values_and_grads(lambda *qkv: full_attention(*qkv, **mask), qkv)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_zigzag_order_equals_full_attention(qkv, segments, mesh):
    def attention(q, k, v):
        q, k, v, ids = (to_zigzag(x, SHARDS) for x in (q, k, v, segments))
        out = ring_attention(
            q, k, v, mesh=mesh, layout="zigzag", window=9, segment_ids=ids, block_size=2
        )
        return from_zigzag(out, SHARDS)

    ours = values_and_grads(attention, qkv)
    theirs = values_and_grads(
        lambda *qkv: full_attention(*qkv, window=9, segment_ids=segments), qkv
    )
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("options", "block_size"),
    [
        pytest.param({"chunk": 4}, 512, id="chunks-of-one-device"),
        pytest.param({"chunk": 16}, 2, id="chunks-of-several"),
        pytest.param({"chunk": 10, "window": 7}, 2, id="chunks-across"),
        pytest.param({"soft_cap": 2.0, "scale": 0.9}, 512, id="soft-cap"),
    ],
)
@pytest.mark.parametrize("spread", [{}, {"batch_axes": (), "head_axes": ("model",)}])
def test_sinks_chunks_and_narrow_values(qkv, segments, mesh, layout, options, block_size, spread):
    """The options of today's models, with values narrower than keys, on one device and on four."""
    arrays = (*qkv[:2], qkv[2][..., :6], jnp.linspace(-1.0, 3.0, H))
    order = to_zigzag if layout == "zigzag" else lambda x, _: x
    back = from_zigzag if layout == "zigzag" else lambda x, _: x

    def attention(q, k, v, sinks):
        q, k, v, ids = (order(x, SHARDS) for x in (q, k, v, segments))
        given = {"segment_ids": ids, "block_size": block_size, "layout": layout, "sinks": sinks}
        return back(ring_attention(q, k, v, mesh=mesh, **given, **options, **spread), SHARDS)

    ours = values_and_grads(attention, arrays)
    theirs = values_and_grads(
        lambda *a: full_attention(*a, segment_ids=segments, **options), arrays
    )
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_chunks_of_one_device_need_no_ring(qkv, mesh):
    step = jax.jit(lambda *a: ring_attention(*a, mesh=mesh, chunk=8))
    assert "collective_permute" not in step.lower(*qkv).as_text()
    farther = jax.jit(lambda *a: ring_attention(*a, mesh=mesh, chunk=16))
    assert "collective_permute" in farther.lower(*qkv).as_text()


def test_no_mesh_and_bfloat16_compute_here(qkv):
    halves = [x.astype(jnp.bfloat16) for x in qkv]
    out = jax.jit(lambda *qkv: ring_attention(*qkv, block_size=8))(*halves)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), full_attention(*qkv), atol=0.05)


def test_double_precision_is_kept(qkv):
    with jax.enable_x64(True):
        qkv = tuple(jnp.asarray(np.asarray(x), jnp.float64) for x in qkv)
        out = jax.jit(lambda *qkv: ring_attention(*qkv, block_size=8))(*qkv)
        np.testing.assert_allclose(out, full_attention(*qkv), atol=1e-13)


@given(shards=st.integers(1, 9), piece=st.integers(1, 5))
def test_zigzag_order_is_an_exact_permutation(shards, piece):
    length = 2 * shards * piece
    order = zigzag_order(length, shards)
    assert sorted(order) == list(range(length))
    for shard, held in enumerate(order.reshape(shards, -1)):
        expected = [*range(shard * piece, (shard + 1) * piece)]
        last = 2 * shards - 1 - shard
        assert [*held] == [*expected, *range(last * piece, (last + 1) * piece)]


def test_zigzag_helpers_undo_each_other_and_agree_with_the_ring():
    x = jnp.arange(2 * 24).reshape(2, 24)
    np.testing.assert_array_equal(from_zigzag(to_zigzag(x, 3), 3), x)
    positions = [local_positions(shard, 8, shards=3, layout="zigzag") for shard in range(3)]
    np.testing.assert_array_equal(np.concatenate(positions), zigzag_order(24, 3))


def work_of_each_shard(layout):
    """Blocks of scores each device computes in a causal ring, counted with the ring's own test."""
    spec = AttentionSpec(causal=True, scale=1.0)
    blocks = [
        np.asarray(local_positions(shard, 8, shards=SHARDS, layout=layout)).reshape(-1, 2)
        for shard in range(SHARDS)
    ]
    return [
        sum(bool(spec.allows_any(q, k)) for q in own for other in blocks for k in other)
        for own in blocks
    ]


def test_zigzag_evens_out_causal_work():
    contiguous, zigzag = work_of_each_shard("contiguous"), work_of_each_shard("zigzag")
    assert sum(contiguous) == sum(zigzag)
    assert contiguous == sorted(contiguous)
    assert contiguous[-1] > 5 * contiguous[0]
    assert len(set(zigzag)) == 1


@pytest.mark.parametrize(
    ("window", "layout", "hops"),
    [(None, "contiguous", 7), (1, "contiguous", 0), (9, "contiguous", 1), (10, "contiguous", 2),
     (9, "zigzag", 7)],
)  # fmt: skip
def test_a_window_shortens_the_ring(window, layout, hops):
    ring = Ring("context", 8, layout, 8, 8, AttentionSpec(causal=True, window=window, scale=1.0))
    assert ring.hops(8) == hops


def test_lowers_for_tpu_without_devices(qkv):
    mesh = AbstractMesh((SHARDS, 2), ("context", "model"), axis_types=(AxisType.Auto,) * 2)
    attend = jax.jit(lambda *qkv: ring_attention(*qkv, mesh=mesh))
    text = attend.trace(*qkv).lower(lowering_platforms=("tpu",)).as_text()
    assert len(re.findall("collective_permute", text)) == 3  # keys, values and their positions
    assert "all_gather" not in text


def test_errors_name_the_fix(qkv, mesh):
    q, k, v = qkv
    with pytest.raises(MeshError, match=r"'contxt', but the mesh .* Did you mean 'context'"):
        ring_attention(q, k, v, mesh=mesh, axis="contxt")
    with pytest.raises(ShardingError, match=r"sequence of 30 .* multiple of 4, such as 28 or 32"):
        ring_attention(q[:, :30], k[:, :30], v[:, :30], mesh=mesh)
    with pytest.raises(ShardingError, match=r"of 28 .* in the zigzag layout: .* multiple of 8"):
        ring_attention(q[:, :28], k[:, :28], v[:, :28], mesh=mesh, layout="zigzag")
    with pytest.raises(ShardingError, match=r"'zigzg' is unknown.* Did you mean 'zigzag'"):
        ring_attention(q, k, v, mesh=mesh, layout="zigzg")
    with pytest.raises(ShardingError, match=r"3 query heads cannot share 2 key heads"):
        ring_attention(q[:, :, :3], k, v)
    with pytest.raises(ShardingError, match=r"needs q \(B, S, H, D\), k \(B, S, K, D\) and v"):
        ring_attention(q, k, v[:, :8])
    with pytest.raises(ShardingError, match=r"segment_ids are \(2, 31\) .* one id per token"):
        ring_attention(q, k, v, segment_ids=jnp.zeros((2, 31), int))
    with pytest.raises(TPUValidationError, match=r"window=0 must be at least 1"):
        ring_attention(q, k, v, window=0)
