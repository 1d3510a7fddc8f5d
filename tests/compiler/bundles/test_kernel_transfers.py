"""Transfers against computing: hand-worked schedules, and what must hold of every one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.compiler.bundles.core_run import Transfer
from tpukit.compiler.bundles.trace import TransferRates, replay
from tpukit.errors import XLACompilationError

RATES = TransferRates(bytes_per_cycle=32.0, latency_cycles=100.0, issue_cycles=0.0)


def test_a_transfer_that_computing_hides_costs_nothing():
    found = replay([Transfer(0, 1, 50, "in"), Transfer(150, 1, 50, "wait")], RATES)
    assert found.stall_cycles == 0
    assert (found.bytes_in, found.bytes_out) == (1600, 0)


def test_what_is_not_hidden_is_waited_for():
    # 50 granules at one a cycle, then the latency: there at 150, asked for at 20.
    found = replay([Transfer(0, 1, 50, "in"), Transfer(20, 1, 50, "wait")], RATES)
    assert found.stall_cycles == pytest.approx(130)


def test_both_directions_share_the_way_to_hbm():
    order = [
        Transfer(0, 1, 50, "out"),
        Transfer(0, 2, 50, "in"),
        Transfer(0, 2, 50, "wait"),
        Transfer(0, 1, 50, "wait"),
    ]
    assert replay(order, RATES).stall_cycles == pytest.approx(200)


def test_a_wait_takes_as_much_as_it_names():
    order = [
        Transfer(0, 1, 10, "in"),
        Transfer(0, 1, 30, "in"),
        Transfer(0, 1, 25, "wait"),
        Transfer(0, 1, 15, "wait"),
    ]
    assert replay(order, RATES).stall_cycles == pytest.approx(140)
    with pytest.raises(XLACompilationError, match="never started"):
        replay([*order, Transfer(0, 1, 1, "wait")], RATES)


def test_a_block_cut_at_the_edge_is_made_up_by_the_core():
    order = [
        Transfer(0, 1, 20, "signal"),
        Transfer(0, 1, 30, "in"),
        Transfer(0, 1, 50, "wait"),
    ]
    found = replay(order, RATES)
    assert found.stall_cycles == pytest.approx(130)
    assert found.bytes_in == 30 * 32


def test_starting_a_transfer_takes_time_and_computing_may_take_longer_than_counted():
    rates = TransferRates(bytes_per_cycle=64.0, latency_cycles=100.0, issue_cycles=7.0)
    order = [
        Transfer(0, 1, 50, "in"),  # 25 cycles: there at 125
        Transfer(10, 2, 20, "local"),  # begun at 37, within VMEM: there at 137
        Transfer(10, 1, 50, "wait"),  # at 44, for 81
        Transfer(10, 2, 20, "wait"),  # at 125, for 12
        Transfer(100, 3, 40, "out"),  # at 407, when the way is free: there at 527
        Transfer(130, 3, 40, "wait"),  # at 504, for 23
    ]
    found = replay(order, rates, compute_factor=3.0)
    assert found.stall_cycles == pytest.approx(81 + 12 + 23)
    assert found.issue_cycles == 21.0
    assert (found.bytes_in, found.bytes_out) == (1600, 1280)


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 400)), min_size=1, max_size=20))
def test_stalls_are_bounded_by_the_transfers_alone(steps):
    order, cycle = [], 0
    for granules, computing in steps:
        order.append(Transfer(cycle, 0, granules, "in"))
        cycle += computing
        order.append(Transfer(cycle, 0, granules, "wait"))
    found = replay(order, RATES)
    alone = sum(granules + 100 for granules, _ in steps)
    assert max(0, alone - cycle) <= found.stall_cycles + 1e-6
    assert found.stall_cycles <= alone + 1e-6
    assert found.bytes_in == sum(granules for granules, _ in steps) * 32
