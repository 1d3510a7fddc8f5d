"""Preemption: the interval is where waste is least, and waste is what a simulated run loses."""

import random

import numpy as np
import pytest

from tpukit.planner.cost.spot import SECONDS_PER_DAY, Preemption

SPOT = Preemption(per_slice_day=4.0, recovery_s=600.0, source="a test")


def waste_of(interval_s, save_s):
    between = SECONDS_PER_DAY / SPOT.per_slice_day
    return save_s / interval_s + (interval_s / 2 + SPOT.recovery_s) / between


@pytest.mark.parametrize("save_s", [1.0, 10.0, 60.0])
def test_no_other_interval_wastes_less(save_s):
    best = float(SPOT.interval_s(save_s, 1))
    tried = np.geomspace(best / 10, best * 10, 400)
    least = min(waste_of(interval, save_s) for interval in tried)
    assert float(SPOT.waste(save_s, 1)) == pytest.approx(waste_of(best, save_s))
    assert waste_of(best, save_s) <= least * (1 + 1e-6)


def test_a_simulated_run_loses_as_much():
    """Exponential preemptions, checkpoints at the interval, whole recoveries."""
    save_s, useful_s = 20.0, 60 * SECONDS_PER_DAY
    between = SECONDS_PER_DAY / SPOT.per_slice_day
    interval = float(SPOT.interval_s(save_s, 1))
    dice = random.Random(0)
    clock = kept = 0.0
    until = dice.expovariate(1 / between)
    while kept < useful_s:
        if until >= interval + save_s:
            until -= interval + save_s
            clock += interval + save_s
            kept += interval
        else:
            clock += until + SPOT.recovery_s
            until = dice.expovariate(1 / between)
    lost = 1 - kept / clock
    assert float(SPOT.waste(save_s, 1)) == pytest.approx(lost, rel=0.15)


def test_more_slices_are_lost_more_often():
    assert SPOT.waste(10.0, 8) > SPOT.waste(10.0, 1)
    assert SPOT.waste(1e9, 1) < 1
