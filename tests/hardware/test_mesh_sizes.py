"""Meshes carried over to other devices: what is checked there is what is trained there."""

from math import prod

import jax
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpukit.errors import MeshError
from tpukit.hardware import Slice
from tpukit.hardware.mesh_sizes import fill_mesh, fit_mesh, parse_mesh, refill_mesh, write_mesh
from tpukit.job.reading import read_job
from tpukit.training import TPUTrainer

AXES = ("data", "fsdp", "zero", "stage", "expert", "context", "tensor")
# Slices of as many devices as this process has CPU devices, or a part of them.
HERE = ("v6e-1", "v6e-4", "v6e-8", "v5e-1", "v5e-4", "v5e-8", "v4-8", "v5p-8")


@st.composite
def meshes(draw):
    """Draw sizes by axis that cover a slice exactly, one of them -1 perhaps."""
    axes = draw(st.lists(st.sampled_from(AXES), min_size=1, max_size=3, unique=True))
    sizes = {axis: draw(st.sampled_from((1, 2, 4))) for axis in axes}
    whole = prod(sizes.values())
    on = {1: "v6e-1", 4: "v6e-4", 8: "v6e-8", 16: "v6e-16", 32: "v6e-32", 64: "v6e-64"}.get(whole)
    if on is None:
        on, sizes[axes[0]] = "v6e-8", sizes[axes[0]] * 4
    if draw(st.booleans()):
        sizes[draw(st.sampled_from(axes))] = -1
    return on, sizes


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(meshes(), st.sampled_from(HERE))
def test_what_is_checked_for_other_devices_is_what_is_trained_there(tmp_path, planned, other):
    on, sizes = planned
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({"model": "tiny", "on": on, "mesh": sizes, "batch_size": 64}))
    checked = read_job(str(path), {"on": other})
    devices = jax.devices()[: Slice.parse(other).devices]
    trained = TPUTrainer.from_job(read_job(str(path)), devices=devices, progress=False)
    assert checked.mesh_sizes == dict(trained.mesh.shape)


@pytest.mark.parametrize(
    ("mesh", "devices", "fitted"),
    [
        ("data=2,fsdp=4", 8, "data=2,fsdp=4"),
        ("data=2,fsdp=4", 16, "data=2,fsdp=8"),
        ("data=2,fsdp=-1", 16, "data=2,fsdp=8"),
        ("data=2,fsdp=4", 1, "data=1,fsdp=1"),
        ("data=4,tensor=2", 16, "data=8,tensor=2"),
        ("fsdp=32,tensor=2", 4, "fsdp=2,tensor=2"),
        ("fsdp=1,tensor=8", 4, "fsdp=4,tensor=1"),
        ("tensor=8", 4, "tensor=4"),
        ("expert=2,tensor=4", 4, "expert=4,tensor=1"),
    ],
)
def test_axes_on_other_devices(mesh, devices, fitted):
    assert write_mesh(fit_mesh(parse_mesh(mesh), devices)) == fitted


@given(st.dictionaries(st.sampled_from(AXES), st.integers(1, 64), min_size=1), st.integers(1, 512))
def test_a_fitted_mesh_covers_the_devices_and_stays_as_it_is(mesh, devices):
    fitted = fit_mesh(mesh, devices)
    assert list(fitted) == list(mesh)
    assert prod(fitted.values()) == devices
    assert fit_mesh(fitted, devices) == fitted
    refilled = refill_mesh(mesh, devices)
    assert refilled is None or fit_mesh(refilled, devices) == fitted


@pytest.mark.parametrize("mesh", ["fsdp=0", "fsdp=-1,data=-1"])
def test_a_size_that_is_none_is_refused(mesh):
    with pytest.raises(MeshError, match="has an invalid size"):
        fit_mesh(parse_mesh(mesh), 8)
    with pytest.raises(MeshError, match="has an invalid size"):
        fill_mesh(parse_mesh(mesh), Slice.parse("v6e-8"))


def test_a_mesh_that_leaves_devices_over_is_refused_with_one_that_does_not():
    with pytest.raises(MeshError, match=r"product is 3, but v6e-8 has 8 devices; write fsdp=8,"):
        fill_mesh({"data": 3, "fsdp": -1}, Slice.parse("v6e-8"))
