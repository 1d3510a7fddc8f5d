"""Device order: whole slices stay together, whatever order the devices come in."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.errors import MeshError
from tpukit.runtime.device_grid import arrange_devices


@dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int = 0
    platform: str = "cpu"
    slice_index: int = 0


def processes(count, each):
    return [FakeDevice(p * each + d, process_index=p) for p in range(count) for d in range(each)]


def test_cpu_devices_keep_their_order():
    devices = processes(1, 6)
    assert arrange_devices((2, 3), devices).tolist() == [devices[:3], devices[3:]]


@settings(deadline=None)
@given(
    dcn=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    ici=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 99),
)
def test_a_block_of_the_grid_is_one_slice(dcn, ici, seed):
    devices = processes(dcn[0] * dcn[1], ici[0] * ici[1])
    np.random.default_rng(seed).shuffle(devices)
    grid = arrange_devices(ici, devices, dcn_shape=dcn)
    assert grid.shape == (dcn[0] * ici[0], dcn[1] * ici[1])
    assert sorted(device.id for device in grid.flat) == list(range(grid.size))
    for row in range(dcn[0]):
        for column in range(dcn[1]):
            block = grid[row * ici[0] : (row + 1) * ici[0], column * ici[1] : (column + 1) * ici[1]]
            owners = {device.process_index for device in block.flat}
            assert owners == ({row * dcn[1] + column} if dcn != (1, 1) else {0})


def test_tpu_slices_are_told_apart_by_slice_index():
    # Single-device slices need no torus, so fakes are enough to see the grouping.
    devices = [FakeDevice(i, platform="tpu", slice_index=1 - i) for i in range(2)]
    with pytest.raises(MeshError, match=r"needs 4 slices and the devices belong to 2"):
        arrange_devices((1, 1), devices, dcn_shape=(4, 1))


@pytest.mark.parametrize(
    ("shape", "dcn", "message"),
    [
        ((4,), None, r"needs 4 devices but got 6"),
        ((3,), (2, 1), r"2 axes but the ICI shape \(3,\) has 1"),
        ((3,), (3,), r"needs 3 slices and the devices belong to 2"),
        ((2,), (2,), r"of each slice needs 2 devices but got 3"),
    ],
)
def test_what_does_not_fit_is_said(shape, dcn, message):
    with pytest.raises(MeshError, match=message):
        arrange_devices(shape, processes(2, 3), dcn_shape=dcn)
