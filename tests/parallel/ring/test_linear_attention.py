"""Linear attention over devices equals that of one: any layout, documents, gradients, heads."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from tpukit.errors import ShardingError
from tpukit.kernels import gated_delta, short_convolution
from tpukit.parallel.ring.linear_attention import context_gated_delta, context_short_convolution
from tpukit.parallel.ring.order import from_zigzag, to_zigzag

B, S, HK, HV, D, E = 2, 64, 2, 4, 8, 12
SHARDS = 4
LAYOUTS = pytest.mark.parametrize("layout", ["contiguous", "zigzag"])


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(SHARDS, 2), ("context", "model"))


@pytest.fixture(scope="module")
def arrays():
    draw = np.random.default_rng(0).standard_normal
    q, k, v = (draw((B, S, *heads)) for heads in ((HK, D), (HK, D), (HV, E)))
    g, beta = -np.exp(draw((B, S, HV)) - 3), 1 / (1 + np.exp(-draw((B, S, HV))))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta, draw((B, HV, D, E))))


@pytest.fixture(scope="module")
def documents():
    """Two that end where a device does, others that do not, and one of several devices."""
    lengths = [16, 7, 1, 40], [3, 29, 32]
    return jnp.asarray(np.stack([np.repeat(np.arange(len(row)), row) for row in lengths]))


def both_passes(function, *arrays):
    def total(*arrays):
        results = function(*arrays)
        weighted = [x * jnp.cos(jnp.arange(x.size)).reshape(x.shape) for x in results]
        return sum(x.sum() for x in weighted), results

    return jax.jit(jax.grad(total, range(len(arrays)), has_aux=True))(*arrays)


def reordered(layout, function):
    """A function of arrays in the order of the sequence, called on them as devices hold them."""
    if layout == "contiguous":
        return function

    def call(*arrays, ids=None):
        tokens = [to_zigzag(x, SHARDS) if x.shape[1] == S else x for x in arrays]
        ids = None if ids is None else to_zigzag(ids, SHARDS)
        out, *state = function(*tokens, ids=ids)
        return from_zigzag(out, SHARDS), *state

    return call


def agree(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * max(1, np.abs(other).max()))


@LAYOUTS
@pytest.mark.parametrize(
    "axes", [{}, {"batch_axes": ()}, {"batch_axes": (), "head_axes": ("model",)}]
)
@pytest.mark.parametrize("with_documents", [False, True])
def test_it_is_that_of_one_device(mesh, arrays, documents, layout, axes, with_documents):
    ids = documents if with_documents else None

    def split(*arrays, ids=None):
        return context_gated_delta(
            *arrays[:5],
            initial_state=arrays[5],
            segment_ids=ids,
            mesh=mesh,
            layout=layout,
            chunk=16,
            **axes,
        )

    def alone(*arrays):
        return gated_delta(*arrays[:5], initial_state=arrays[5], segment_ids=ids)

    found = both_passes(partial(reordered(layout, split), ids=ids), *arrays)
    agree(found, both_passes(alone, *arrays))


def test_more_devices_than_heads_of_keys(arrays):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("context", "model"))
    found = context_gated_delta(*arrays[:5], mesh=mesh, batch_axes=(), head_axes=("model",))
    agree(found, gated_delta(*arrays[:5]))


@LAYOUTS
@pytest.mark.parametrize("axes", [{}, {"batch_axes": (), "channel_axes": ("model",)}])
@pytest.mark.parametrize("with_documents", [False, True])
def test_the_convolution_reaches_over_devices(
    mesh, arrays, documents, layout, axes, with_documents
):
    x, weight = arrays[2].reshape(B, S, -1), arrays[5].reshape(HV * E, -1)[:, :4]
    ids = documents if with_documents else None

    def split(x, weight, ids=None):
        options = {"mesh": mesh, "layout": layout, "segment_ids": ids, **axes}
        return (context_short_convolution(x, weight, **options),)

    def alone(x, weight):
        return (short_convolution(x, weight, segment_ids=ids)[0],)

    found = both_passes(partial(reordered(layout, split), ids=ids), x, weight)
    agree(found, both_passes(alone, x, weight))


def test_without_a_mesh_it_is_the_op(arrays):
    agree(context_gated_delta(*arrays[:5]), gated_delta(*arrays[:5]))


def test_what_cannot_be_split_is_refused(mesh, arrays):
    with pytest.raises(ShardingError, match="sequence of 62 cannot be split over 'context'=4"):
        context_gated_delta(*(x[:, :62] for x in arrays[:5]), mesh=mesh)
    with pytest.raises(ShardingError, match="A filter of 4 tokens extends beyond the piece"):
        context_short_convolution(jnp.ones((1, 8, 3)), jnp.ones((3, 4)), mesh=mesh)
