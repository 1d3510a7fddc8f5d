"""Meshes from shapes and names, on eight virtual CPU devices."""

import math

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from tpukit.errors import MeshError
from tpukit.parallel import MeshConfig, abstract_mesh, create_mesh
from tpukit.parallel.mesh.axes import ROLE_OF_AXIS, axes_with_role, role_of

NAMES = ("data", "fsdp", "expert", "model")


def test_a_config_and_keywords_make_the_same_mesh():
    config = MeshConfig(mesh_shape=(2, 4), axis_names=("data", "model"), devices=jax.devices())
    by_config = create_mesh(config)
    assert by_config == create_mesh(mesh_shape=(2, 4), axis_names=("data", "model"))
    assert dict(by_config.shape) == {"data": 2, "model": 4}
    assert by_config.devices.ravel().tolist() == jax.devices()
    assert set(by_config.axis_types) == {AxisType.Auto}


def test_a_mapping_says_shape_and_names_at_once():
    mesh = create_mesh(mesh_shape=(2, 4), axis_names=("data", "fsdp"))
    assert create_mesh({"data": 2, "fsdp": 4}) == create_mesh({"data": 2, "fsdp": -1}) == mesh
    assert create_mesh(mesh_shape={"data": 2, "fsdp": 4}) == mesh
    assert create_mesh((2, 4), axis_names=("data", "fsdp")) == mesh
    assert abstract_mesh({"fsdp": 64}).size == 64


def test_the_documents_data_parallel_mesh_drops_its_unnamed_one():
    assert dict(create_mesh(mesh_shape=(8, 1), axis_names=("data",)).shape) == {"data": 8}


def test_minus_one_is_all_that_is_left():
    assert create_mesh(mesh_shape=(2, -1), axis_names=("data", "model")).shape["model"] == 4
    some = create_mesh(mesh_shape=(-1,), axis_names=("data",), devices=jax.devices()[:3])
    assert some.shape["data"] == 3


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.booleans())
def test_a_mesh_covers_the_devices_or_says_why_not(sizes, fill):
    shape = (*sizes[:-1], -1) if fill else tuple(sizes)
    needed = math.prod(size for size in shape if size != -1)
    names = NAMES[: len(shape)]
    if 8 % needed if fill else needed != 8:
        with pytest.raises(MeshError, match="devices"):
            create_mesh(mesh_shape=shape, axis_names=names)
    else:
        mesh = create_mesh(mesh_shape=shape, axis_names=names)
        assert mesh.size == 8
        assert sorted(device.id for device in mesh.devices.flat) == list(range(8))


def test_an_abstract_mesh_needs_no_devices():
    mesh = abstract_mesh(mesh_shape=(16, 16), axis_names=("data", "model"), dcn_mesh_shape=(4, 1))
    assert dict(mesh.shape) == {"data": 64, "model": 16}
    assert mesh.size == 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh_shape": (64,)}, r"needs 64 devices, 8 here; .*device_count=64.*abstract_mesh"),
        ({"mesh_shape": (4,)}, r"needs 4 devices, 8 here; use -1 .*jax\.devices\(\)\[:4\]"),
        ({"mesh_shape": (2, 4)}, r"shape \(2, 4\) has 2 axes but 1 names \('data',\)"),
        ({"mesh_shape": (8,), "axis_names": ("data", "model")}, r"has 1 axes but 2 names"),
        ({"mesh_shape": (2, 4), "axis_names": ("data", "data")}, r"'data' appears twice"),
        ({"mesh_shape": (8,), "axis_names": (3,)}, r"axis name is 3; it must be a word"),
        ({"mesh_shape": (0,)}, r"where 0 is not a size"),
        ({"mesh_shape": (2.5,)}, r"where 2\.5 is not a size"),
        ({"mesh_shape": (-1, -1), "axis_names": ("data", "model")}, r"more than one -1"),
        ({"mesh_shape": (3, -1), "axis_names": ("data", "model")}, r"not a multiple of 3"),
        ({"mesh_shape": (8,), "dcn_mesh_shape": (-1,)}, r"-1 is only filled in for mesh_shape"),
        ({"mesh_shape": (4,), "dcn_mesh_shape": (2,)}, r"needs 2 slices .* belong to 1"),
        ({"mesh_shape": {"data": 8}}, r"names its axes; leave axis_names out"),
        ({"mesh_shape": 8}, r"is 8; expected a size per axis: {'data': 4}"),
        ({"mesh_shape": "data=8"}, r"is 'data=8'; expected a size per axis"),
        ({"mesh_config": {"data": 8}, "mesh_shape": (8,)}, r"two shapes, {'data': 8} and \(8,\)"),
        ({"mesh_shape": None}, r"needs mesh_shape; give both"),
        ({"mesh_shape": (8,), "axis_names": None}, r"needs axis_names; give both"),
    ],
)
def test_a_wrong_mesh_teaches(arguments, message):
    with pytest.raises(MeshError, match=message):
        create_mesh(**{"axis_names": ("data",), **arguments})


def test_config_and_keywords_together_are_refused():
    with pytest.raises(MeshError, match="both a MeshConfig and keywords"):
        create_mesh(MeshConfig((8,), ("data",)), mesh_shape=(8,))


def test_an_abstract_mesh_cannot_guess():
    with pytest.raises(MeshError, match="no devices to fill in its -1"):
        abstract_mesh(mesh_shape=(-1,), axis_names=("data",))


def test_a_config_is_json_data():
    assert MeshConfig((4, 2), ("data", "model"), dcn_mesh_shape=(2, 1)).to_dict() == {
        "mesh_shape": [4, 2],
        "axis_names": ["data", "model"],
        "devices": None,
        "dcn_mesh_shape": [2, 1],
    }


def test_axis_names_have_roles():
    assert {role_of(name) for name in ROLE_OF_AXIS} == set(ROLE_OF_AXIS.values())
    assert axes_with_role(("dcn", "fsdp", "model", "odd"), "replica", "tensor") == ("dcn", "model")
    with pytest.raises(MeshError, match=r"'modle' has no known role.*Did you mean 'model'"):
        role_of("modle")
