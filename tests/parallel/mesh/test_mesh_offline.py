"""Meshes of real TPU topologies, with no TPU: mesh neighbours are torus neighbours."""

import math
import os
import sys
from pathlib import Path

import pytest

from tpukit.runtime.child import offline_environment, run_child

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]

CASES = [
    {"topology": "v5e:4x4", "options": {}, "shape": [4, 4]},
    {"topology": "v6e:4x4", "options": {}, "shape": [16]},
    {"topology": "v5p:4x4x4", "options": {}, "shape": [4, 16]},
    {"topology": "v6e:4x4", "options": {}, "shape": [2, 8]},
    {"topology": "v4:2x2x4", "options": {"chip_config_name": "megacore"}, "shape": [4, 4]},
    {"topology": "tpu7x:2x2x1", "options": {}, "shape": [2, 2, 2]},
    {"topology": "v6e:4x4", "options": {"num_slices": 2}, "shape": [4, 4], "dcn": [2, 1]},
    {"topology": "v6e:4x4", "options": {}, "shape": [3], "take": 3},
]


@pytest.fixture(scope="module")
def meshes():
    pytest.importorskip("libtpu")
    here = str(Path(__file__).parent)
    environment = offline_environment({"PYTHONPATH": os.pathsep.join([here, *sys.path])})
    reply = run_child(
        "offline_mesh_child", {"cases": CASES}, timeout_s=120, environment=environment
    )
    return reply["meshes"]


def test_every_device_has_one_place(meshes):
    for case, mesh in zip(CASES[:-1], meshes[:-1], strict=True):
        dcn = case.get("dcn", [1] * len(case["shape"]))
        assert mesh["shape"] == [
            inner * outer for inner, outer in zip(case["shape"], dcn, strict=True)
        ]
        places = {str(place) for place in mesh["places"]}
        assert len(places) == len(mesh["places"]) == math.prod(mesh["shape"])


def test_a_row_of_the_mesh_walks_the_torus(meshes):
    for index in (0, 1):  # whole physical axes, and a ring through the whole plane
        mesh = meshes[index]
        width = mesh["shape"][-1]
        for start in range(0, len(mesh["places"]), width):
            row = [coords for coords, _, _ in mesh["places"][start : start + width]]
            for one, other in zip(row, [*row[1:], row[0]] if index else row[1:], strict=False):
                assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) == 1


def test_an_axis_of_sixteen_is_a_plane_of_the_cube(meshes):
    places = [coords for coords, _, _ in meshes[2]["places"]]
    for start in range(0, 64, 16):
        assert len({coords[2] for coords in places[start : start + 16]}) == 1


def test_slices_are_the_outer_half_of_the_dcn_axis(meshes):
    slices = [number for _, _, number in meshes[6]["places"]]
    assert slices == [0] * 16 + [1] * 16


def test_a_broken_block_is_refused(meshes):
    assert "not one whole block of the torus" in meshes[7]["error"]
