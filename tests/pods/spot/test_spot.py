"""Spot zones: prices by the catalogue, churn by what happened, and refusals with a reason."""

import asyncio
import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tpukit.errors import ConfigError, PodUnavailable
from tpukit.hardware import Figure, Slice, public_prices
from tpukit.planner.cost.money import Preemption
from tpukit.pods import BiddingStrategy, Cause, Pod, PodConfig, PodLife, PodState, SpotManager, Tier
from tpukit.pods.spot.ranking import (
    REFUSAL_HALF_LIFE_S,
    price_in,
    priced_zones,
    rank_zones,
    read_zone,
)
from tpukit.pods.store.store import NoLives

NOW = 1_800_000_000.0
DAY = 86_400.0
ZONES = ("us-east5-b", "europe-west4-a", "us-central1-b")


class Remembered:
    def __init__(self, *lives):
        self._lives = lives

    def lives(self, *, since):
        return [life for life in self._lives if (life.ended_at or NOW) >= since]


class Asked:
    """Grants what it is asked for, and remembers it."""

    def __init__(self):
        self.configs = []

    def allocate_pod(self, config):
        self.configs.append(config)
        return Pod(
            name="job-a1",
            provider="local",
            slice=config.slice,
            zone=config.zones[0],
            state=PodState.READY,
            tier=config.tier,
        )


def life(zone, *, asked=-DAY, ready=0.0, ended=None, cause=None, of="v6e-16"):
    return PodLife(
        slice=of,
        zone=zone,
        tier=Tier.SPOT,
        asked_at=NOW + asked,
        ready_at=None if ready is None else NOW + asked + ready,
        ended_at=None if ended is None else NOW + ended,
        cause=cause,
    )


def manager(**changes):
    return replace(SpotManager().with_manager(Asked()), now=lambda: NOW, **changes)


def test_strategies_are_read_in_every_spelling():
    for spelt in ("CostOptimized", "cost-optimised", "COST_OPTIMIZED", "cost optimized"):
        assert BiddingStrategy(spelt) is BiddingStrategy.CostOptimized
    with pytest.raises(ConfigError, match=r"no bidding strategy 'balance'.*'balanced'"):
        BiddingStrategy("balance")


def test_prices_are_the_catalogues_for_the_whole_pod():
    book, on = public_prices(), Slice.parse("2xv6e-16")
    for zone in priced_zones(on, book, Tier.SPOT):
        price = price_in(on, zone, book, Tier.SPOT)
        region = zone.rpartition("-")[0]
        assert price == book.cost_per_hour(on, region=region, tier="spot")
        assert price.value == pytest.approx(32 * book.quote(on, region=region, tier="spot").value)


def test_nothing_is_asked_for_above_the_cap():
    spot = manager().with_max_price_per_hour(0.01)
    with pytest.raises(PodUnavailable, match=r"above the cap of 0.01.*days old") as caught:
        spot.bid_for_pod(PodConfig(tpu_type="v6e-16"))
    assert caught.value.cause == Cause.UNPLACEABLE
    assert spot.manager.configs == []


def test_a_placeholder_price_is_no_price():
    with pytest.raises(PodUnavailable, match="placeholder, 700"):
        manager().bid_for_pod(PodConfig(tpu_type="v6e-16", zones=("us-central2-b",)))


def test_an_unknown_zone_names_those_with_a_price():
    with pytest.raises(PodUnavailable, match="only in asia-"):
        manager().bid_for_pod(PodConfig(tpu_type="v6e-16", zones=("mars-north1-a",)))


def test_own_rates_count_where_the_list_has_none():
    own = public_prices().with_rates(
        {"rates": [{"generation": "7x", "tier": "spot", "usd_per_chip_h": 3.0}]}
    )
    config = PodConfig(tpu_type="tpu7x-2x2x1", zones=("us-central1-c",))
    (bid,) = manager().with_prices(own).rank(config).bids
    assert (bid.price.value, bid.price.origin) == (12.0, "user")


def test_the_pods_own_cap_holds_too():
    spot = manager().with_max_price_per_hour(1e6)
    with pytest.raises(PodUnavailable, match=r"above the cap of 0\.02"):
        spot.bid_for_pod(PodConfig(tpu_type="v6e-16", max_price_per_hour=0.02))


def test_the_cheapest_useful_step_is_asked_for_first():
    spot = manager()
    pod = spot.bid_for_pod(PodConfig(tpu_type="v6e-16"))
    costs = [bid.cost.value for bid in spot.rank(PodConfig(tpu_type="v6e-16")).bids]
    assert costs == sorted(costs)
    (asked,) = spot.manager.configs
    assert (pod.zone, pod.tier) == (asked.zones[0], Tier.SPOT)
    assert len(asked.zones) == len(costs)


def test_it_can_be_awaited():
    spot = manager()

    async def main():
        return await spot.bid_for_pod(PodConfig(tpu_type="v6e-16", zones=ZONES))

    assert asyncio.run(main()).is_ready


def test_a_zone_that_loses_pods_costs_more_than_its_price():
    config = PodConfig(tpu_type="v6e-16", zones=ZONES)
    before = manager().rank(config)
    cheap = before.bids[0].zone
    churned = [
        life(cheap, asked=-n * DAY / 50, ended=-n * DAY / 50 + 600, cause=Cause.SPOT)
        for n in range(1, 200)
    ]
    after = manager(history=Remembered(*churned)).rank(config)
    lost = next(bid for bid in after.bids if bid.zone == cheap)
    assert lost.record.lost_per_day.value > 20
    assert lost.cost.value > before.bids[0].cost.value
    assert lost.save_every.value < before.bids[0].save_every.value
    available = manager(history=Remembered(*churned)).with_bidding_strategy("availability")
    assert available.rank(config).bids[-1].zone == cheap


def test_churn_is_counted_over_the_days_that_pods_were_up():
    lives = (
        life("a", asked=-4 * DAY, ended=-2 * DAY, cause=Cause.SPOT),  # 2 days up, lost
        life("a", asked=-1 * DAY, ended=0.0, cause=Cause.DONE),  # 1 day up, finished by itself
        life("b", asked=-1 * DAY, ended=0.0, cause=Cause.SPOT),  # another zone
        life("a", asked=-1 * DAY, ended=0.0, cause=Cause.SPOT, of="v6e-8"),  # another slice
    )
    record = read_zone(
        Remembered(*lives),
        slice_name="v6e-16",
        zone="a",
        tier=Tier.SPOT,
        now=NOW,
        expected=Preemption(per_slice_day=3.0, recovery_s=100.0, source="the record"),
        restart_s=40.0,
    )
    assert record.lost_per_day.value == pytest.approx((1 + 3.0) / (3 + 1))
    assert "1 preemptions in 3.00 pod-days" in record.lost_per_day.source
    assert record.wait_s.value == pytest.approx((0 + 0 + 60) / 3)  # ready at once, and the record


def test_a_refusal_fades_and_locks_nothing():
    def wait(age_s):
        refused = life("a", asked=-age_s, ready=None, ended=-age_s, cause=Cause.STOCKOUT)
        return read_zone(
            Remembered(refused),
            slice_name="v6e-16",
            zone="a",
            tier=Tier.SPOT,
            now=NOW,
            expected=Preemption(),
            restart_s=60.0,
        )

    fresh, half, old = wait(0.0), wait(REFUSAL_HALF_LIFE_S), wait(40 * REFUSAL_HALF_LIFE_S)
    assert (fresh.recent_refusals, half.recent_refusals) == (1.0, 0.5)
    assert fresh.wait_s.value > half.wait_s.value > old.wait_s.value
    assert old.wait_s.value == pytest.approx(Preemption().recovery_s - 60.0, abs=0.01)


@settings(max_examples=25, deadline=None)
@given(
    lost=st.floats(0.01, 40),
    wait=st.floats(0, 3000),
    save=st.floats(0.1, 120),
    restart=st.floats(0, 300),
)
def test_the_expected_cost_is_what_a_simulation_spends(lost, wait, save, restart):
    """Against days played out pod by pod: exponential lives, lost work, nothing paid while away."""
    spot = manager().with_work(step_s=1.0, save_s=save, restart_s=restart)
    recovery = wait + restart
    up_mean = DAY / lost - recovery
    if up_mean < 4 * save + 60:
        return
    expected = Preemption(per_slice_day=lost, recovery_s=recovery, source="given")
    ranking = rank_zones(
        Slice.parse("v6e-16"),
        ZONES[:1],
        book=public_prices(),
        history=NoLives(),
        work=spot.work,
        strategy=spot.strategy,
        now=NOW,
        expected=expected,
    )
    (bid,) = ranking.bids
    interval = bid.save_every.value
    rng = np.random.default_rng(0)
    lives = rng.exponential(up_mean, 20_000)
    useful = np.floor(lives / (interval + save)) * interval
    paid = lives + restart
    assert bid.useful_share.value == pytest.approx(
        useful.sum() / (lives + recovery).sum(), rel=0.05
    )
    assert bid.cost.value == pytest.approx(bid.price.value * paid.sum() / useful.sum(), rel=0.05)


def test_measured_times_come_through():
    spot = manager().with_work(step_s=Figure(2.0, "s", "measured", "run"), save_s=5.0)
    (bid, *_) = spot.rank(PodConfig(tpu_type="v6e-16")).bids
    assert bid.cost_per_step.value == pytest.approx(bid.cost.value * 2.0 / 3600)
    unknown = manager().rank(PodConfig(tpu_type="v6e-16")).bids[0]
    assert unknown.cost_per_step.value is None
    assert "with_work" in unknown.cost_per_step.reason


def test_the_ranking_prints_itself_with_its_origins():
    text = io.StringIO()
    Console(file=text, width=160).print(manager().rank(PodConfig(tpu_type="v6e-16", zones=ZONES)))
    shown = text.getvalue()
    for part in ("us-east5-b", "third-party", "2026-08-21", "days old", "skypilot"):
        assert part in shown


def test_bad_numbers_are_refused():
    with pytest.raises(ConfigError, match="max_price_per_hour"):
        SpotManager().with_max_price_per_hour(-1)
    with pytest.raises(ConfigError, match="save_s"):
        SpotManager().with_work(save_s=-1)
