"""Zones ranked by what a useful step costs there: price, churn, waiting and recovery together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...hardware import Figure, PriceBook, Slice
from ...planner.cost.spot import SECONDS_PER_DAY, Preemption
from ...shown import Shown
from ..config import PodConfig
from ..pod import Tier
from ..prices import catalogue_age, price_of
from .life import PodLives
from .records import ZoneRecord, read_zone
from .strategy import BiddingStrategy
from .work import Work

USD_PER_HOUR = "USD/h"
# Machines of one's own have no price; a rehearsal on them ranks zones as the real thing would.
ANY_CLOUD = "gcp"


@dataclass(frozen=True, kw_only=True)
class ZoneBid:
    """One zone that is within the cap, and what it would be like.

    Attributes:
        price: The whole pod for an hour, by the catalogue.
        useful_share: Of the time on the clock, what ends in steps that are kept.
        cost: Of an hour of useful steps; no pod is paid for while none is there.
        cost_per_step: The same of one step; missing where no step was measured.
        save_every: Between two checkpoints, by Young and Daly.
    """

    zone: str
    price: Figure
    record: ZoneRecord
    useful_share: Figure
    cost: Figure
    cost_per_step: Figure
    save_every: Figure

    def to_dict(self) -> dict[str, Any]:
        """Plain data, each figure with where it came from."""
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
    """The zones of a slice, the best first, and why the others are not among them."""

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
        """How old the prices are."""
        return catalogue_age(self.catalogue)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
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
    """Rank zones for a slice; those without a price, or above the cap, are left out with why.

    Args:
        on: The whole pod.
        zones: To choose from; empty: all that the catalogue knows for it.
        book: Prices.
        history: What became of earlier pods.
        work: What the job does between two preemptions.
        strategy: What makes a zone better.
        now: Seconds since the epoch.
        max_price_per_hour: The cap in USD an hour, for the whole pod.
        tier: Spot, unless something else is to be compared.
        expected: Of zones nobody has used; by default the public record.
    """
    of_one = expected or Preemption()
    # A pod of several slices is lost with any of them.
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
    none = Figure.missing(USD_PER_HOUR, "the catalogue has no such slice")
    return ZoneRanking(
        slice=on,
        strategy=strategy,
        bids=tuple(bids),
        refused=refused,
        catalogue=min(listed, key=lambda price: price.date, default=none),
    )


def priced_zones(on: Slice, book: PriceBook, tier: Tier) -> tuple[str, ...]:
    """Return all zones for which the catalogue has a price of this slice."""
    rates = book.find(on.chip.name, tier=tier.value)
    found = (zone for rate in rates if rate.covers(on.chips_per_slice) for zone in rate.zones)
    return tuple(dict.fromkeys(found))


def price_in(on: Slice, zone: str, book: PriceBook, tier: Tier) -> Figure:
    """Return USD an hour for the whole pod in a zone; missing, with the reason, where unknown."""
    asked = PodConfig(tpu_type=str(on), tier=tier)
    price = price_of(asked, zone=zone, provider=ANY_CLOUD, book=book)
    known = priced_zones(on, book, tier)
    # Rates of the user's own name no zones; of the list's, a region has the slice in some only.
    if price.origin == "user" or zone in known or (price.value is None and not known):
        return price
    rejected = book.refusals.get((on.chip.name, zone.rpartition("-")[0]))
    priced = f"the catalogue has no {tier.value} price of {on} there; priced are "
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
    # A pod that is not there is not paid for; one that restarts is.
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
