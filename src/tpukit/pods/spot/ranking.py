"""Rank zones by the cost of a useful step, from price, preemptions, waits and recovery."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...hardware import Figure, PriceBook, Slice
from ...planner.cost.money import SECONDS_PER_DAY, Preemption
from ...runtime.ranges import Range
from ...shown import Shown
from ..causes import Kind
from ..config import PodConfig
from ..cost import catalogue_age, price_of
from ..pod import Tier
from ..spelling import SpelledEnum
from ..store.store import PodLife, PodLives


class BiddingStrategy(SpelledEnum):
    """How spot zones are ranked. A zone that is worse in both money and time never wins.

    Attributes:
        COST_OPTIMIZED: Least money per useful step.
        BALANCED: Least product of money and time per useful step: a zone at twice the price must be
            more than twice as fast.
        AVAILABILITY: Least time per useful step, including waits and recovery.
    """

    COST_OPTIMIZED = "cost_optimized"
    BALANCED = "balanced"
    AVAILABILITY = "availability"

    CostOptimized = COST_OPTIMIZED
    Balanced = BALANCED
    Availability = AVAILABILITY

    def score(self, *, usd_per_useful_h: float, useful_share: float) -> float:
        """Return the number to rank by, lowest first."""
        slowness = 1 / useful_share if useful_share > 0 else float("inf")
        match self:
            case BiddingStrategy.COST_OPTIMIZED:
                return usd_per_useful_h
            case BiddingStrategy.BALANCED:
                return usd_per_useful_h * slowness
            case BiddingStrategy.AVAILABILITY:
                return slowness


_SECONDS = Range(0, 86_400)
_ASSUMED = "assumed, because nothing was measured; set your own with with_work()"
_NO_STEP = Figure.missing("s", "no step was measured; with_work(step_s=…)")
_SAVE = Figure(30.0, "s", "model", f"saves of 30 s are {_ASSUMED}")
_RESTART = Figure(60.0, "s", "model", f"restarts of 60 s are {_ASSUMED}")


def seconds_figure(seconds: float | Figure, what: str) -> Figure:
    """Return seconds as a figure; a plain number has origin `user`."""
    if isinstance(seconds, Figure):
        return seconds
    return Figure(_SECONDS.check(what, seconds, unit="seconds"), "s", "user", what)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Durations of the parts of a job.

    Attributes:
        step_s: A step; if missing, only an hour of steps is priced.
        save_s: The pause of a step for a checkpoint.
        restart_s: From a ready pod to the next step: start, restore and compile.
    """

    step_s: Figure = _NO_STEP
    save_s: Figure = _SAVE
    restart_s: Figure = _RESTART


WINDOW_S = 7 * SECONDS_PER_DAY
# A refusal counts half after this long. Fixed pauses of 5 to 15 min kept good zones out (marin-
# community/marin, pull request 5699).
REFUSAL_HALF_LIFE_S = 900.0
# The public record has the weight of this many days of own measurements.
PRIOR_DAYS = 1.0
BETWEEN_REQUESTS_S = 60.0
_DAY = "1/day"


@dataclass(frozen=True)
class ZoneRecord:
    """Preemptions and waits of a slice type in one zone and tier.

    Attributes:
        lost_per_day: Preemptions of one pod per day, recoveries included.
        wait_s: From the request to a ready pod, refusals included.
        recent_refusals: Number of recent refusals, weighted by age.
    """

    lost_per_day: Figure
    wait_s: Figure
    recent_refusals: float


def read_zone(
    history: PodLives,
    *,
    slice_name: str,
    zone: str,
    tier: Tier,
    now: float,
    expected: Preemption,
    restart_s: float,
    window_s: float = WINDOW_S,
) -> ZoneRecord:
    """Return a zone's record from earlier pods, blended with the public record.

    Args:
        history: Earlier pods.
        slice_name: The slice type as `str(Slice)` writes it.
        zone: The zone.
        tier: The tier.
        now: Seconds since the epoch.
        expected: Assumption for a zone without own measurements.
        restart_s: The part of a recovery after the pod is ready.
        window_s: Age of the oldest pods to use.
    """
    since = now - window_s
    lives = [
        life
        for life in history.lives(since=since)
        if (life.slice, life.zone, life.tier) == (slice_name, zone, tier)
    ]
    refused = [life for life in lives if _is_refusal(life)]
    faded = sum(_faded(now - (life.ended_at or life.asked_at)) for life in refused)
    return ZoneRecord(
        lost_per_day=_lost_per_day(lives, since, now, expected),
        wait_s=_wait_s(lives, refused, faded, max(0.0, expected.recovery_s - restart_s), expected),
        recent_refusals=faded,
    )


def _lost_per_day(
    lives: Iterable[PodLife], since: float, now: float, expected: Preemption
) -> Figure:
    wanted_days = lost = 0.0
    for life in lives:
        if life.ready_at is not None:
            up_s = min(life.ended_at or now, now) - max(life.ready_at, since)
            wanted_days += max(0.0, up_s) / SECONDS_PER_DAY
            lost += life.cause is not None and life.cause.kind is Kind.EVICTION
    record = Figure(expected.per_slice_day, _DAY, "third-party", expected.source)
    if not wanted_days:
        return record
    own = f"{lost:.0f} preemptions in {wanted_days:.2f} pod-days"
    seen = Figure(lost / wanted_days, _DAY, "measured", own)
    weighted = (lost + expected.per_slice_day * PRIOR_DAYS) / (wanted_days + PRIOR_DAYS)
    return Figure.derived(weighted, _DAY, inputs=(seen, record))


def _wait_s(
    lives: Iterable[PodLife],
    refused: list[PodLife],
    faded: float,
    usual_s: float,
    expected: Preemption,
) -> Figure:
    granted = [life.ready_at - life.asked_at for life in lives if life.ready_at is not None]
    record = Figure(usual_s, "s", "third-party", expected.source)
    wait = record
    if granted:
        own = f"mean of {len(granted)} pods here"
        seen = Figure(statistics.fmean(granted), "s", "measured", own)
        mean = (sum(granted) + usual_s) / (len(granted) + 1)
        wait = Figure.derived(mean, "s", inputs=(seen, record))
    if not faded:
        return wait
    # Each recent refusal stands for one more request that may be refused.
    took = statistics.fmean((life.ended_at or life.asked_at) - life.asked_at for life in refused)
    each = Figure(
        took + BETWEEN_REQUESTS_S, "s", "measured", f"{len(refused)} refusals here, weighted by age"
    )
    return wait + each * faded


def _is_refusal(life: PodLife) -> bool:
    return life.ready_at is None and life.cause is not None and (life.cause.kind is Kind.CAPACITY)


def _faded(age_s: float) -> float:
    return 0.5 ** (max(0.0, age_s) / REFUSAL_HALF_LIFE_S)


USD_PER_HOUR = "USD/h"
# The user's own machines have no price; a rehearsal on them uses cloud prices.
ANY_CLOUD = "gcp"


@dataclass(frozen=True, kw_only=True)
class ZoneBid:
    """A zone within the cap, with its expected cost.

    Attributes:
        price: USD per hour of the whole pod, from the catalog.
        useful_share: Share of wall-clock time spent in steps that are kept.
        cost: Cost of an hour of useful steps; a missing pod costs nothing.
        cost_per_step: Cost of one useful step; missing if no step was measured.
        save_every: Checkpoint interval by Young and Daly.
    """

    zone: str
    price: Figure
    record: ZoneRecord
    useful_share: Figure
    cost: Figure
    cost_per_step: Figure
    save_every: Figure

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, each figure with its source."""
        return {
            "zone": self.zone,
            "price": self.price.to_dict(),
            "lost_per_day": self.record.lost_per_day.to_dict(),
            "wait_s": self.record.wait_s.to_dict(),
            "recent_refusals": self.record.recent_refusals,
            "useful_share": self.useful_share.to_dict(),
            "cost_per_useful_h": self.cost.to_dict(),
            "cost_per_step": self.cost_per_step.to_dict(),
            "save_every": self.save_every.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class ZoneRanking(Shown):
    """The zones for a slice, best first, and why others are excluded."""

    slice: Slice
    strategy: BiddingStrategy
    bids: tuple[ZoneBid, ...]
    refused: dict[str, str]
    catalogue: Figure

    @property
    def best(self) -> ZoneBid | None:
        """The zone to ask first."""
        return self.bids[0] if self.bids else None

    @property
    def age_text(self) -> str:
        """The age of the prices."""
        return catalogue_age(self.catalogue)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "slice": str(self.slice),
            "strategy": self.strategy.value,
            "catalogue_date": self.catalogue.date,
            "zones": [bid.to_dict() for bid in self.bids],
            "refused": dict(self.refused),
        }

    def __rich__(self) -> RenderableType:
        table = Table(title=f"spot {self.slice} by {self.strategy.value}", title_justify="left")
        for name in ("zone", "USD/h", "lost/day", "wait", "useful", "USD/useful h", "save every"):
            of_zone = name == "zone"
            table.add_column(name, justify="left" if of_zone else "right", no_wrap=of_zone)
        for bid in self.bids:
            table.add_row(
                bid.zone,
                _number(bid.price, ".2f"),
                _number(bid.record.lost_per_day, ".2f"),
                f"{_number(bid.record.wait_s, '.0f')} s",
                _number(bid.useful_share, ".1%"),
                _number(bid.cost, ".2f"),
                f"{_number(bid.save_every, '.0f')} s",
            )
        lines = [Text(f"{zone}: {why}", style="dim") for zone, why in self.refused.items()]
        if self.bids:
            bid = self.bids[0]
            lost = bid.record.lost_per_day
            lines += [
                Text(f"price: {bid.price.origin}, {bid.price.source}; {self.age_text}", "dim"),
                Text(f"lost: {lost.origin}, {lost.source}", "dim"),
                Text(f"useful hours: {bid.cost.origin}, {bid.save_every.source}", "dim"),
            ]
        return Group(table, *lines)


def rank_zones(
    on: Slice,
    zones: Sequence[str],
    *,
    book: PriceBook,
    history: PodLives,
    work: Work,
    strategy: BiddingStrategy,
    now: float,
    max_price_per_hour: float | None = None,
    tier: Tier = Tier.SPOT,
    expected: Preemption | None = None,
) -> ZoneRanking:
    """Rank zones for a slice; exclude those without a price or above the cap, with reasons.

    Args:
        on: The slice or slices of the whole pod.
        zones: Zones to rank; empty uses all zones in the catalog.
        book: Prices.
        history: Earlier pods.
        work: Durations of the job's parts.
        strategy: How zones are ranked.
        now: Seconds since the epoch.
        max_price_per_hour: Price cap in USD per hour for the whole pod.
        tier: The tier whose prices are compared.
        expected: Assumption for zones without own measurements; by default the public record.
    """
    of_one = expected or Preemption()
    # Losing one slice loses the whole pod.
    of_pod = replace(of_one, per_slice_day=of_one.per_slice_day * on.num_slices)
    bids: list[ZoneBid] = []
    refused: dict[str, str] = {}
    for zone in zones or priced_zones(on, book, tier):
        price = price_in(on, zone, book, tier)
        if price.value is None:
            refused[zone] = price.reason
        elif max_price_per_hour is not None and price.value > max_price_per_hour:
            refused[zone] = f"{price.value:.2f} USD/h is above the cap of {max_price_per_hour:.2f}"
        else:
            restart_s = work.restart_s.require("ranking zones")
            record = read_zone(
                history,
                slice_name=str(on),
                zone=zone,
                tier=tier,
                now=now,
                expected=of_pod,
                restart_s=restart_s,
            )
            bids.append(_bid(zone, price, record, work))
    bids.sort(
        key=lambda bid: (
            strategy.score(
                usd_per_useful_h=bid.cost.value or float("inf"),
                useful_share=bid.useful_share.value or 0.0,
            ),
            bid.price.value,
            bid.zone,
        )
    )
    listed = [rate.price for rate in book.find(on.chip.name, tier=tier.value)]
    none = Figure.missing(USD_PER_HOUR, "the price catalog has no such slice")
    return ZoneRanking(
        slice=on,
        strategy=strategy,
        bids=tuple(bids),
        refused=refused,
        catalogue=min(listed, key=lambda price: price.date, default=none),
    )


def priced_zones(on: Slice, book: PriceBook, tier: Tier) -> tuple[str, ...]:
    """Return all zones for which the catalog has a price of this slice."""
    rates = book.find(on.chip.name, tier=tier.value)
    zones = (zone for rate in rates if rate.covers(on.chips_per_slice) for zone in rate.zones)
    return tuple(dict.fromkeys(zones))


def price_in(on: Slice, zone: str, book: PriceBook, tier: Tier) -> Figure:
    """Return USD per hour of the whole pod in a zone, or a missing figure with the reason."""
    request = PodConfig(tpu_type=str(on), tier=tier)
    price = price_of(request, zone=zone, provider=ANY_CLOUD, book=book)
    known = priced_zones(on, book, tier)
    # The user's own rates apply to every zone; in the list, only some zones of a region have the
    # slice.
    if price.origin == "user" or zone in known or (price.value is None and not known):
        return price
    rejected = book.refusals.get((on.chip.name, zone.rpartition("-")[0]))
    priced = f"the price catalog has no {tier.value} price for {on} there, only in "
    return Figure.missing(USD_PER_HOUR, rejected or priced + ", ".join(known[:8]))


def _bid(zone: str, price: Figure, record: ZoneRecord, work: Work) -> ZoneBid:
    lost = record.lost_per_day.require("ranking zones")
    wait_s = record.wait_s.require("ranking zones")
    restart_s, save_s = work.restart_s.value or 0.0, work.save_s.require("ranking zones")
    step_s = work.step_s.value or 0.0
    recovery_s = min(wait_s + restart_s, SECONDS_PER_DAY)
    here = Preemption(per_slice_day=lost, recovery_s=recovery_s, source=f"{zone}")
    inputs = (record.lost_per_day, record.wait_s, work.restart_s, work.save_s)
    share = float(here.progress(save_s, 1, step_s=step_s))
    up_s = max(0.0, float(here.up_s(1)))
    # A missing pod costs nothing, but a restarting one does.
    paid = (up_s + restart_s) / (up_s + recovery_s)
    useful = Figure.derived(share, "", inputs=inputs)
    hours = paid / share if share > 0 else float("inf")
    cost = Figure.derived((price.value or 0.0) * hours, "USD/useful h", inputs=(price, *inputs))
    interval = float(here.interval_s(save_s, 1, step_s=step_s))
    return ZoneBid(
        zone=zone,
        price=price,
        record=record,
        useful_share=useful,
        cost=cost,
        cost_per_step=Figure.derived(
            (cost.value or 0.0) * step_s / 3600, "USD/step", inputs=(cost, work.step_s)
        ),
        save_every=Figure.derived(interval, "s", inputs=inputs),
    )


def _number(figure: Figure, form: str) -> str:
    return "–" if figure.value is None else format(figure.value, form)
