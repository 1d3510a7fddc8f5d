"""A split matrix: its codes lie as it would, and it multiplies as a whole one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from vq_arrays import made_up

from tpukit.errors import ShardingError
from tpukit.quantization import array_shardings, place_array


def on_mesh(*spec):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    return NamedSharding(mesh, PartitionSpec(*spec))


@pytest.mark.parametrize("spec", [("data", "model"), (None, ("data", "model")), ("model",), ()])
@pytest.mark.parametrize("name", ["vq:2x16x2", "trellis2:64"])
def test_products_of_a_split_matrix(name, spec):
    array = made_up(name, (32, 1024), rotated=True)
    placed = place_array(array, on_mesh(*spec))
    whole = jnp.asarray(np.random.default_rng(0).standard_normal((4, 32)), jnp.float32)
    found = jax.jit(lambda x, w: x @ w)(whole, placed)
    np.testing.assert_allclose(found, whole @ array, atol=1e-3)
    rows, columns = (*spec, None, None)[:2]
    assert placed.codes.sharding.spec[1:] == (rows, columns)


def test_a_stack_is_split_too():
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), made_up("vq2", (32, 16)))
    placed = place_array(stacked, on_mesh("model", "data"))
    assert placed.codes.sharding.spec == PartitionSpec("model", None, "data", None)
    assert np.array_equal(placed.codes, stacked.codes)


@pytest.mark.parametrize(
    ("name", "shape", "spec", "said"),
    [
        ("vq2", (24, 16), ("data",), "6 vectors of 4 rows, which 4 devices of data"),
        ("vq2", (32, 15), (None, "model"), "15 columns"),
        ("trellis2", (32, 384), (None, "model"), "3 runs of 128 columns"),
    ],
)
def test_no_cut_goes_through_a_vector(name, shape, spec, said):
    with pytest.raises(ShardingError, match=said):
        array_shardings(made_up(name, shape), on_mesh(*spec))
