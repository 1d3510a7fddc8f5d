"""The made-up cloud: who gets capacity and when, what holds quota, and that a seed decides all."""

import threading
from dataclasses import replace

import pytest

from tpukit_emulators.clock import DrivenClock, RealClock
from tpukit_emulators.holding import (
    Holding,
    NotOffered,
    OverQuota,
    Pace,
    Reservation,
    Stage,
    Zone,
)
from tpukit_emulators.world import World

PACE = Pace(decide_s=1, start_s=10, notice_s=30, release_s=1)
ASK = Holding(name="a", zone="z1", kind="v6e", amount=8, spot=True)


@pytest.fixture
def clock():
    return DrivenClock()


@pytest.fixture
def world(clock):
    zones = {
        "z1": Zone({"v6e": 16}, spot_quota={"v6e": 32}),
        "z2": Zone({"v6e": 8}, reservations={"ours": Reservation("v6e", 8)}),
    }
    return World(zones, clock=clock, pace=PACE)


def stages(world):
    return {held.name: held.stage.value for held in world.holdings()}


def test_a_holding_goes_through_its_stages(world, clock):
    seen = []
    world.watch(lambda held: seen.append((held.stage.value, round(clock.now() - 1_800_000_000))))
    world.ask(ASK)
    clock.advance(20)
    world.preempt("a")
    clock.advance(40)
    world.release("a")
    clock.advance(5)
    assert seen == [
        *(("new", 0), ("waiting", 1), ("starting", 1), ("running", 11)),
        *(("leaving", 20), ("lost", 50), ("ending", 60), ("gone", 61)),
    ]
    assert not world.holdings()


def test_who_finds_no_capacity_waits_until_some_is_given_back(world, clock):
    for name in "abc":
        world.ask(replace(ASK, name=name))
    clock.advance(20)
    assert stages(world) == {"a": "running", "b": "running", "c": "waiting"}
    world.release("a")
    clock.advance(20)
    assert stages(world) == {"b": "running", "c": "running"}


def test_what_was_lost_holds_quota_until_it_is_released(world, clock):
    for name in "abcd":
        world.ask(replace(ASK, name=name))
    clock.advance(20)
    world.preempt("a")
    clock.advance(60)
    assert stages(world)["a"] == "lost"
    with pytest.raises(OverQuota) as refused:
        world.ask(replace(ASK, name="e"))
    assert (refused.value.held, refused.value.limit) == (32, 32)
    world.release("a")
    clock.advance(5)
    world.ask(replace(ASK, name="e"))


def test_a_stock_out_keeps_holders_and_ends(world, clock):
    world.ask(ASK)
    clock.advance(20)
    world.sell_out("z1", "v6e", for_s=100)
    world.ask(replace(ASK, name="b"))
    clock.advance(90)
    assert stages(world) == {"a": "running", "b": "waiting"}
    clock.advance(30)
    assert stages(world) == {"a": "running", "b": "running"}


def test_who_was_not_served_in_time_is_refused(world, clock):
    world.sell_out("z1", "v6e")
    world.ask(replace(ASK, expires_at=clock.now() + 60))
    clock.advance(59)
    assert stages(world) == {"a": "waiting"}
    clock.advance(1)
    assert world.get("a").stage is Stage.REFUSED
    assert world.get("a").reason == "expired"


def test_a_reservation_is_for_those_who_name_it(world, clock):
    world.ask(replace(ASK, zone="z2", spot=False))
    world.ask(replace(ASK, name="b", zone="z2", spot=False))
    world.ask(replace(ASK, name="c", zone="z2", spot=False, reservation="ours"))
    clock.advance(20)
    assert stages(world) == {"a": "running", "b": "waiting", "c": "running"}


def test_maintenance_is_announced_before_it_comes(world, clock):
    world.ask(ASK)
    clock.advance(20)
    world.announce_maintenance("a", in_s=600)
    assert world.get("a").maintenance.starts_at == clock.now() + 600
    clock.advance(599)
    assert stages(world) == {"a": "running"}
    clock.advance(31)
    assert (world.get("a").stage, world.get("a").reason) == (Stage.LOST, "maintenance")


@pytest.mark.parametrize(
    "wanted",
    [
        replace(ASK, zone="nowhere"),
        replace(ASK, kind="v99"),
        replace(ASK, reservation="theirs"),
    ],
)
def test_what_is_not_offered_is_refused(world, wanted):
    with pytest.raises(NotOffered):
        world.ask(wanted)
    assert not world.holdings()


def lives(seed):
    clock = DrivenClock()
    pace = replace(PACE, start_spread=0.5, spot_life_s=600, notice_s=0)
    world = World({"z": Zone({"v6e": 1000})}, clock=clock, pace=pace, seed=seed)
    ends = {}
    world.watch(
        lambda held: ends.update({held.name: clock.now()}) if held.stage is Stage.LOST else None
    )
    for number in range(50):
        world.ask(replace(ASK, name=f"p{number}", zone="z"))
    clock.advance(10_000)
    return ends


def test_the_seed_decides_how_long_each_lives():
    assert lives(1) == lives(1)
    assert lives(1) != lives(2)
    mean_s = sum(lives(3).values()) / 50 - 1_800_000_000
    assert 400 < mean_s < 900


def test_a_real_clock_makes_its_calls_in_order_and_can_run_faster():
    clock = RealClock(rate=1000)
    made, done = [], threading.Event()
    clock.call_later(30, lambda: (made.append("late"), done.set()))
    clock.call_later(10, lambda: made.append("early"))
    clock.call_later(20, lambda: made.append("never")).cancel()
    assert done.wait(10)
    assert made == ["early", "late"]
    clock.close()


def test_a_call_that_fails_does_not_stop_the_clock(caplog):
    clock, done = RealClock(rate=1000), threading.Event()
    clock.call_later(1, lambda: 1 / 0)
    clock.call_later(2, done.set)
    assert done.wait(10)
    assert "ZeroDivisionError" in caplog.text
    clock.close()
