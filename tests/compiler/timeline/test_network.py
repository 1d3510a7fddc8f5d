"""Collectives on the torus, against the counting argument for each."""

import itertools

import pytest
from link_loads import busiest_link

from tpukit.compiler.hlo import Collective
from tpukit.compiler.timeline import Machine, Network
from tpukit.errors import XLACompilationError
from tpukit.hardware import Slice

MEGABYTE = 10**6


def network(name, **machine):
    target = Slice.parse(name)
    places = tuple(itertools.product(*(range(size) for size in target.topology)))
    per_chip = target.chip.devices_per_chip
    coordinates = tuple(place for place in places for _ in range(per_chip))
    return Network(Machine.of(target, **machine), coordinates, (0,) * len(coordinates))


def seconds(net, kind, groups, size=100 * MEGABYTE):
    return net.transfer(Collective(kind, groups, size, "c")).seconds


def everyone(net):
    return (tuple(range(len(net.coordinates))),)


def test_a_wrapped_torus_gathers_from_four_sides():
    net = network("v6e-256")  # 16x16, both axes wrap
    expected = 100e6 * 255 / 256 / (4 * 90e9) + (8 + 8) * 1e-6
    assert seconds(net, "all-gather", everyone(net)) == pytest.approx(expected)


def test_a_reduction_goes_over_one_axis_after_another():
    net = network("v6e-8")  # 2x4, no wrap: half of it over one link, then 3/4 of the other half
    expected = 1e9 * (1 / 2 + 1 / 2 * 3 / 4) / 90e9 + (1 + 3) * 1e-6
    assert seconds(net, "reduce-scatter", everyone(net), 10**9) == pytest.approx(expected)
    net = network("v6e-256")
    row = (tuple(range(16)),)
    assert seconds(net, "reduce-scatter", row) == pytest.approx(seconds(net, "all-gather", row))


def test_a_reduction_goes_over_all_axes_where_libtpu_was_told_to():
    net = network("tpu7x-4x4x4", reduces_at_once=True)
    gathered = seconds(net, "all-gather", everyone(net))
    assert seconds(net, "reduce-scatter", everyone(net)) == pytest.approx(gathered)
    assert seconds(network("tpu7x-4x4x4"), "reduce-scatter", everyone(net)) > 2 * gathered


def test_a_sum_over_a_pod_is_as_fast_as_published():
    # AI-Hypercomputer/tpu-recipes, microbenchmarks/trillium/collectives: psum_ici of 0.606 GB.
    net, size = network("v6e-256"), 606_076_928
    taken = seconds(net, "all-reduce", everyone(net), size)
    assert 2 * size * 255 / 256 / taken / 1e9 == pytest.approx(235.76, rel=0.02)


def test_a_small_slice_has_no_wrap():
    net = network("v6e-16")  # 4x4, no wrap
    expected = 100e6 * 15 / 16 / (2 * 90e9) + (3 + 3) * 1e-6
    assert seconds(net, "all-gather", everyone(net)) == pytest.approx(expected)


def test_a_group_along_one_axis_uses_that_axis_alone():
    net = network("v6e-256")
    row = (tuple(range(16)),)  # devices 0 … 15 share x
    expected = 100e6 * 15 / 16 / (2 * 90e9) + 8 * 1e-6
    assert seconds(net, "all-gather", row) == pytest.approx(expected)
    lanes = net.transfer(Collective("all-gather", row, 1, "c")).lanes
    assert lanes == {"y+", "y-"}


def test_a_cube_uses_three_axes():
    net = network("v5p-128")  # 4x4x4, all wrap
    expected = 100e6 * 63 / 64 / (6 * 90e9) + 6 * 1e-6
    assert seconds(net, "all-gather", everyone(net)) == pytest.approx(expected)


def test_two_devices_of_a_chip_share_its_links():
    net = network("tpu7x-4x4x4")
    assert len(net.coordinates) == 128
    link = Slice.parse("tpu7x-4x4x4").chip.ici_link_effective_gbps.value * 1e9
    expected = 100e6 * 63 / 64 / (6 * link) + 6 * 1e-6
    assert seconds(net, "all-gather", everyone(net)) == pytest.approx(expected)


def test_neighbours_permute_over_one_link_each():
    net = network("v6e-256")
    ring = tuple((i, (i + 1) % 16) for i in range(16))
    assert seconds(net, "collective-permute", ring) == pytest.approx(100e6 / 90e9 + 1e-6)
    back = tuple((b, a) for a, b in ring)
    up = net.transfer(Collective("collective-permute", ring, 1, "c")).lanes
    down = net.transfer(Collective("collective-permute", back, 1, "c")).lanes
    assert (up, down) == ({"y+"}, {"y-"})
    swap = ((0, 1), (1, 0))  # as many up as down
    assert net.transfer(Collective("collective-permute", swap, 1, "c")).lanes == {"y+"}
    mostly_down = ((0, 1), (3, 2), (6, 5))
    assert net.transfer(Collective("collective-permute", mostly_down, 1, "c")).lanes == {"y-"}
    across = tuple((16 * i, 16 * ((i + 1) % 16)) for i in range(16))
    assert net.transfer(Collective("collective-permute", across, 1, "c")).lanes == {"x+"}


def test_permutes_that_share_a_link_take_turns():
    net = network("v6e-16")
    line = ((0, 2), (1, 3))  # both cross the link between 1 and 2
    assert seconds(net, "collective-permute", line) == pytest.approx(2 * 100e6 / 90e9 + 2e-6)


def test_permutes_take_the_shorter_way():
    net = network("v6e-16")
    into_one = ((0, 2), (1, 2))  # both come over the link from 1, the first by way of it
    assert seconds(net, "collective-permute", into_one) == pytest.approx(2 * 100e6 / 90e9 + 2e-6)
    apart = ((0, 1), (3, 2))
    assert seconds(net, "collective-permute", apart) == pytest.approx(100e6 / 90e9 + 1e-6)
    from_end_to_end = ((0, 3),)  # the line does not wrap
    assert seconds(net, "collective-permute", from_end_to_end) == pytest.approx(100e6 / 90e9 + 3e-6)
    wrapped = network("v6e-256")
    for target, hops in ((6, 6), (8, 8), (10, 6)):
        assert seconds(wrapped, "collective-permute", ((0, target),)) == pytest.approx(
            100e6 / 90e9 + hops * 1e-6
        )
    half_way = ((0, 8), (7, 8))  # as far either way: up, and so over the link from 7
    assert seconds(wrapped, "collective-permute", half_way) == pytest.approx(2e8 / 90e9 + 8e-6)
    over_the_edge = ((15, 1), (0, 1))  # 15 goes on to 0
    assert seconds(wrapped, "collective-permute", over_the_edge) == pytest.approx(
        2 * 100e6 / 90e9 + 2e-6
    )


@pytest.mark.parametrize("kind", ["all-gather", "all-reduce", "all-to-all"])
def test_more_bytes_never_take_less_time(kind):
    net = network("v5e-16")
    times = [seconds(net, kind, everyone(net), size=10**power) for power in range(3, 10)]
    assert times == sorted(times)


def test_a_group_of_one_costs_nothing():
    assert seconds(network("v5e-16"), "all-gather", ((3,),)) == 0.0
    assert seconds(network("v5e-1"), "all-gather", ()) == 0.0


def test_two_neighbours_share_over_the_link_between_them():
    net = network("v6e-16")
    pair = ((0, 1),)
    assert seconds(net, "all-gather", pair) == pytest.approx(50e6 / 90e9 + 1e-6)
    assert seconds(net, "all-reduce", pair) == pytest.approx(2 * 50e6 / 90e9 + 2e-6)


def test_the_devices_of_one_chip_need_no_link():
    transfer = network("tpu7x-2x2x1").transfer(Collective("all-gather", ((0, 1),), 10**9, "c"))
    assert (transfer.seconds, transfer.lanes, transfer.track) == (1e-6, frozenset(), "ici")


def test_half_a_ring_is_no_ring():
    net = network("v6e-256")
    half = (tuple(range(8)),)  # of the 16 along y: 7 links one after the other
    assert seconds(net, "all-gather", half) == pytest.approx(100e6 * 7 / 8 / 90e9 + 7e-6)


def test_permutes_between_the_devices_of_two_chips_share_the_link():
    net = network("tpu7x-2x2x1")  # two devices a chip, each with half of the link
    link = net.machine.slice.chip.ici_link_effective_gbps.value * 1e9
    for pairs, load in ((((0, 2),), 1), (((0, 2), (1, 3)), 1), (((0, 2), (1, 3), (0, 3)), 2)):
        expected = load * 100e6 / link + 1e-6
        assert seconds(net, "collective-permute", pairs) == pytest.approx(expected)
    within = ((0, 1), (1, 0))
    assert seconds(net, "collective-permute", within) == 0.0


def test_a_program_of_another_slice_is_refused():
    with pytest.raises(XLACompilationError, match="was compiled for"):
        seconds(network("v6e-16"), "all-gather", ((0, 99),))


def test_slices_do_not_share_links():
    one = network("v6e-16")
    two = Network(one.machine, one.coordinates * 2, (0,) * 16 + (1,) * 16)
    neighbours = ((0, 1), (16, 17))  # the same places in two slices
    expected = pytest.approx(100e6 / 90e9 + 1e-6)
    assert seconds(two, "collective-permute", neighbours) == expected


@pytest.mark.parametrize(
    ("name", "length", "is_ring", "hops"), [("v6e-64", 8, False, 7), ("v6e-256", 16, True, 8)]
)
def test_an_exchange_of_everyone_with_everyone_takes_what_its_busiest_link_does(
    name, length, is_ring, hops
):
    net = network(name)
    row = (tuple(range(length)),)
    busiest = 100e6 / length * busiest_link(length, is_ring=is_ring) / 90e9
    assert seconds(net, "all-to-all", row) == pytest.approx(busiest + hops * 1e-6)


def test_coordinates_may_have_an_axis_that_the_slice_has_not():
    flat = network("v6e-256")
    places = tuple((*place, 0) for place in flat.coordinates)
    net = Network(flat.machine, places, flat.slices)
    ring = tuple((i, (i + 1) % 16) for i in range(16))
    assert seconds(net, "collective-permute", ring) == seconds(flat, "collective-permute", ring)
    assert seconds(net, "all-gather", everyone(net)) == seconds(flat, "all-gather", everyone(flat))
