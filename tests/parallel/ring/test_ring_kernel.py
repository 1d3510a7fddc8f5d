"""Ring attention by the flash kernel: the same as attention in float64, on every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpukit.errors import ShardingError
from tpukit.models.remat.policy import RematPolicy
from tpukit.parallel.mesh.mesh import abstract_mesh
from tpukit.parallel.ring.attention import ring_attention
from tpukit.parallel.ring.order import from_zigzag, to_zigzag

B, S, H, KV, D = 1, 1024, 4, 2, 64
SHARDS = 4


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(SHARDS, 2), ("context", "tensor"))


@pytest.fixture(scope="module")
def arrays():
    random = np.random.default_rng(0)
    shapes = [(B, S, heads, D) for heads in (H, KV, KV, H)]
    return tuple(jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)


@pytest.fixture(scope="module")
def segments():
    return jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (B, S)), axis=1))


def exact(arrays, *, causal=True, window=None, segment_ids=None, chunk=None, soft_cap=None):
    """Result and gradients of a softmax over all scores in float64."""
    with jax.enable_x64(True):
        *inputs, d_out = (jnp.asarray(np.asarray(x), jnp.float64) for x in arrays)

        def whole(q, k, v, sinks=None):
            k, v = (jnp.repeat(x, H // KV, axis=2) for x in (k, v))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            seen = np.tri(S, dtype=bool) if causal else np.ones((S, S), bool)
            if window is not None:
                seen = seen & ~np.tri(S, k=-window, dtype=bool)
            if chunk is not None:
                seen = seen & np.kron(np.eye(S // chunk, dtype=bool), np.ones((chunk, chunk), bool))
            if segment_ids is not None:
                ids = np.asarray(segment_ids)
                seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
            weights = jnp.where(seen, jnp.exp(scores), 0)
            total = weights.sum(-1, keepdims=True)
            total = total if sinks is None else total + jnp.exp(sinks)[:, None, None]
            return jnp.einsum("bhqk,bkhd->bqhd", weights / total, v)

        out, pull = jax.vjp(whole, *inputs)
        return [np.asarray(x) for x in (out, *pull(d_out))]


@pytest.mark.parametrize(
    ("layout", "causal", "window", "packed", "head_axes"),
    [
        pytest.param("contiguous", True, None, False, (), id="contiguous"),
        pytest.param("zigzag", True, None, True, ("tensor",), id="zigzag-packed-heads-split"),
        pytest.param("contiguous", False, None, True, (), id="both-ways-packed"),
        pytest.param("contiguous", True, 200, True, (), id="window-packed", marks=pytest.mark.slow),
        pytest.param("zigzag", True, 129, False, (), id="zigzag-window"),
        pytest.param("zigzag", True, 1, False, (), id="only-itself"),
    ],
)
def test_the_kernel_in_a_ring_is_attention(
    mesh, arrays, segments, layout, causal, window, packed, head_axes
):
    ids = segments if packed else None
    order = to_zigzag if layout == "zigzag" else lambda x, _: x
    back = from_zigzag if layout == "zigzag" else lambda x, _: x

    def ring(q, k, v):
        out = ring_attention(
            *(order(x, SHARDS) for x in (q, k, v)),
            segment_ids=None if ids is None else order(ids, SHARDS),
            mesh=mesh,
            causal=causal,
            window=window,
            layout=layout,
            batch_axes=(),
            head_axes=head_axes,
            implementation="pallas_tpu",
            interpret=True,
        )
        return back(out, SHARDS)

    @jax.jit
    def both(q, k, v, d_out):
        out, pull = jax.vjp(ring, q, k, v)
        return out, *pull(d_out)

    found = both(*arrays)
    wanted = exact(arrays, causal=causal, window=window, segment_ids=ids)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param("zigzag", {"chunk": 256}, id="zigzag-chunks-of-two-pieces"),
        pytest.param("contiguous", {"chunk": 512}, id="chunks-of-two-devices"),
        pytest.param("contiguous", {"chunk": 128, "soft_cap": 2.0}, id="chunks-of-one-device"),
        pytest.param("zigzag", {"window": 100}, id="window", marks=pytest.mark.slow),
    ],
)
def test_the_kernel_takes_chunks_sinks_and_narrow_values(mesh, arrays, layout, options):
    q, k, v, d_out = arrays
    given = (q, k, v[..., :32], jnp.linspace(-1.0, 3.0, H), d_out[..., :32])
    order = to_zigzag if layout == "zigzag" else lambda x, _: x
    back = from_zigzag if layout == "zigzag" else lambda x, _: x
    spread = {"batch_axes": (), "head_axes": ("tensor",), "implementation": "pallas_tpu"}

    def ring(q, k, v, sinks):
        q, k, v = (order(x, SHARDS) for x in (q, k, v))
        out = ring_attention(
            q, k, v, mesh=mesh, sinks=sinks, layout=layout, interpret=True, **spread, **options
        )
        return back(out, SHARDS)

    @jax.jit
    def both(*arrays):
        *inputs, d_out = arrays
        out, pull = jax.vjp(ring, *inputs)
        return out, *pull(d_out)

    for one, other in zip(both(*given), exact(given, **options), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        pytest.param({"batch_axes": ("data",)}, True, id="spread-known"),
        pytest.param({}, False, id="axes-left-automatic"),
        pytest.param({"batch_axes": ("data",), "window": 64}, True, id="window"),
        pytest.param({"batch_axes": ("data",), "window": 400}, False, id="far-window"),
        pytest.param({"batch_axes": ("data",), "implementation": "xla"}, False, id="asked"),
    ],
)
def test_a_program_for_tpu_holds_the_kernel_where_it_can(options, kernels):
    on = abstract_mesh(mesh_shape=(2, 4), axis_names=("data", "context"))
    place = NamedSharding(on, PartitionSpec("data", "context"))
    q, k = (jax.ShapeDtypeStruct((2, S, n, D), "bfloat16", sharding=place) for n in (H, KV))
    step = jax.jit(lambda q, k: ring_attention(q, k, k, mesh=on, layout="zigzag", **options))
    text = step.trace(q, k).lower(lowering_platforms=("tpu",)).as_text()
    assert ("tpu_custom_call" in text) == kernels
    assert "collective_permute" in text


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="axes-left-automatic"),
        pytest.param({"batch_axes": (), "window": S // SHARDS + 2}, id="far-window"),
        pytest.param({"batch_axes": (), "causal": False, "window": 8}, id="window-both-ways"),
    ],
)
def test_a_kernel_that_cannot_is_refused(mesh, arrays, options):
    q, k, v, _ = arrays
    with pytest.raises(ShardingError, match=r"cannot run this ring attention.*leave"):
        ring_attention(q, k, v, mesh=mesh, implementation="pallas_tpu", **options)


@pytest.mark.parametrize("window", [None, 64])
def test_keeping_the_result_spares_the_backward_pass_the_forward_kernel(window):
    on = abstract_mesh(mesh_shape=(4,), axis_names=("context",))
    place = NamedSharding(on, PartitionSpec(None, "context"))
    q = jax.ShapeDtypeStruct((1, S, KV, D), "bfloat16", sharding=place)

    def kernels(remat):
        attend = RematPolicy.parse(remat).wrap(
            lambda q: 2 * ring_attention(q, q, q, mesh=on, window=window, batch_axes=())
        )
        step = jax.jit(jax.grad(lambda q: jnp.sum(attend(q).astype(jnp.float32))))
        return str(step.trace(q).jaxpr).count("name=flash_attention_forward")

    assert 0 < 2 * kernels("save=attention") == kernels("full")
