"""validate_sharding: silent when right, a readable diff when wrong."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from tpukit.errors import ShardingError
from tpukit.parallel import create_mesh, make_layout, shard_model, validate_sharding


@pytest.fixture(scope="module")
def mesh():
    return create_mesh(mesh_shape=(2, 4), axis_names=("data", "model"))


def put(mesh, spec, shape=(8, 8)):
    return jax.device_put(jnp.arange(64.0).reshape(shape), NamedSharding(mesh, spec))


def test_the_documents_call_works(mesh):
    report = validate_sharding(put(mesh, P("data", "model")), mesh)
    assert report.to_dict() == {
        "arrays": [{"path": "", "shape": [8, 8], "spec": [["data"], ["model"]]}]
    }


@pytest.mark.parametrize("spec", [P("data"), P("data", None), P(("data",), None)])
def test_the_same_split_may_be_written_in_many_ways(mesh, spec):
    validate_sharding(put(mesh, P("data")), mesh, spec)


def test_a_tree_a_layout_and_a_strategy_are_expectations(mesh):
    params = {"up": {"kernel": jnp.ones((64, 128))}, "norm": {"scale": jnp.ones(64)}}
    sharded = shard_model(params, mesh, "fsdp+megatron")
    layout = make_layout(params, mesh, "fsdp+megatron")
    for expected in ("fsdp+megatron", layout, layout.specs, layout.shardings):
        report = validate_sharding(sharded, mesh, expected)
        assert [path for path, _, _ in report.arrays] == ["norm/scale", "up/kernel"]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report)
    assert "2 arrays in place" in console.export_text()


def test_what_is_no_array_is_not_checked(mesh):
    model = shard_model(eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0)), mesh, "fsdp")
    assert len(validate_sharding(model, mesh, "fsdp").arrays) == 4


def test_the_diff_names_path_seen_and_expected(mesh):
    other = create_mesh(mesh_shape=(8,), axis_names=("data",))
    tree = {
        "right": put(mesh, P("data")),
        "turned": put(mesh, P(None, "model")),
        "alone": jnp.zeros((8, 8)),
        "host": np.zeros((8, 8)),
        "elsewhere": put(other, P(None, "data")),
    }
    with pytest.raises(ShardingError) as caught:
        validate_sharding(tree, mesh, P("data"))
    assert str(caught.value).splitlines() == [
        "4 of 5 arrays are not split as expected; move them with reshard(), or correct what is "
        "expected:",
        "  alone (8, 8): on 1 device outside the mesh, expected data",
        "  elsewhere (8, 8): -, data on another mesh (data=8), expected data",
        "  host (8, 8): not on any device (ndarray), expected data",
        "  turned (8, 8): split -, model, expected data",
    ]


def test_a_long_diff_is_cut(mesh):
    tree = [jnp.zeros((8, 8)) for _ in range(20)]
    with pytest.raises(ShardingError, match=r"20 of 20 arrays(.|\n)*\.\.\. and 8 more"):
        validate_sharding(tree, mesh, P("data"))


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (P("modle"), r"names the axis 'modle'.*Did you mean 'model'"),
        (P(None, None, "data"), r"has 3 entries, but its shape is \(8, 8\)"),
        (P(("data", "model"), "data"), r"uses the axis 'data' twice"),
        ([P(), P()], r"got 2 specs for 1 leaves"),
        ("fspd", r"Unknown sharding strategy 'fspd'"),
    ],
)
def test_an_impossible_expectation_is_its_own_error(mesh, expected, message):
    with pytest.raises(ShardingError, match=message):
        validate_sharding(put(mesh, P("data")), mesh, expected)


def test_a_dimension_that_cannot_divide_is_said(mesh):
    with pytest.raises(ShardingError, match=r"dimension 0=6 does not divide over model=4"):
        validate_sharding(jnp.zeros((6,)), mesh, P("model"))
