"""Links of mesh axes: the same as the timeline's network finds from device coordinates."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.compiler.hlo import Collective
from tpukit.compiler.timeline.machine import Machine
from tpukit.compiler.timeline.network import Network
from tpukit.hardware import Slice
from tpukit.planner.cost.torus import AXES, Links, _take, place_axes

SLICES = ("v5e-16", "v5e-256", "v6e-64", "v6e-256", "v5p-128", "v5p-32")


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("kind", ["all-gather", "all-to-all"])
def test_one_axis_over_the_whole_slice_takes_as_long_as_the_timeline_says(name, kind):
    target = Slice.parse(name)
    machine = Machine.of(target)
    coordinates = tuple(itertools.product(*(range(length) for length in target.topology)))
    network = Network(machine, coordinates, (0,) * target.chips)
    size = 10**8
    collective = Collective(kind, (tuple(range(target.chips)),), size, "c")
    links = place_axes(target, {"fsdp": target.devices})["fsdp"]
    latency = links.hops * machine.hop_latency_s
    once = size * links.share / (links.lanes * machine.ici_bytes_per_s) + latency
    expected = {
        "all-gather": once,
        "all-to-all": size * links.all_to_all / machine.ici_bytes_per_s + latency,
    }
    assert network.transfer(collective).seconds == pytest.approx(expected[kind])


@pytest.mark.parametrize("name", ["v5e-256", "v6e-256", "v5p-128"])
def test_a_sum_along_one_axis_of_the_torus_takes_as_long_as_the_timeline_says(name):
    target = Slice.parse(name)
    machine = Machine.of(target)
    coordinates = tuple(itertools.product(*(range(length) for length in target.topology)))
    line = target.topology[-1]
    network = Network(machine, coordinates, (0,) * target.chips)
    seconds = network.transfer(Collective("all-reduce", (tuple(range(line)),), 10**8, "c")).seconds
    links = place_axes(target, {"fsdp": target.devices // line, "tensor": line})["tensor"]
    once = 10**8 * links.share / (links.lanes * machine.ici_bytes_per_s)
    assert seconds == pytest.approx(2 * (once + links.hops * machine.hop_latency_s))


def test_the_last_axis_is_served_first_and_rings_count_twice():
    links = place_axes(Slice.parse("v6e-256"), {"fsdp": 16, "tensor": 16})
    assert links["tensor"] == links["fsdp"]
    assert links["tensor"].lanes == 2
    pieces = place_axes(Slice.parse("v6e-256"), {"fsdp": 64, "tensor": 4})
    assert pieces["tensor"].lanes == 1  # a piece of a ring is a line
    assert pieces["tensor"].hops == 3


def test_devices_of_one_chip_need_no_links():
    links = place_axes(Slice.parse("tpu7x-2x2x1"), {"fsdp": 4, "tensor": 2})
    assert links["tensor"] == Links()
    assert links["fsdp"].chips == 4


@given(
    name=st.sampled_from((*SLICES, "tpu7x-4x4x4")),
    cuts=st.lists(st.integers(0, 8), min_size=3, max_size=3),
)
def test_the_chips_of_all_axes_multiply_to_the_slice(name, cuts):
    target = Slice.parse(name)
    left = target.devices
    sizes = {}
    for axis, cut in zip(AXES[3:], cuts, strict=True):
        sizes[axis] = math.gcd(left, 2**cut)
        left //= sizes[axis]
    sizes["fsdp"] = left
    links = place_axes(target, sizes)
    assert math.prod(link.chips for link in links.values()) == target.chips


@pytest.mark.parametrize(
    ("topology", "sizes"),
    [
        ((16, 16), (16, 2, 8)),
        ((16, 16), (4, 64)),
        ((2, 4), (2, 4)),
        ((4, 4, 8), (8, 2, 8)),
        ((4, 4, 8), (4, 2, 16)),
        ((2, 2, 4), (16,)),
    ],
)
def test_no_chip_is_given_to_two_axes(topology, sizes):
    free = dict(enumerate(topology))
    for size in sizes:
        before = math.prod(free.values())
        taken = _take(free, size)
        assert math.prod(taken.values()) == size
        assert min(taken.values()) > 1
        assert math.prod(free.values()) == before // size
    assert set(free.values()) == {1}
