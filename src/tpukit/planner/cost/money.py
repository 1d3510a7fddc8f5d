"""Days, chip-hours and dollars of a whole run, for every candidate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigError
from ...hardware import Figure, PriceBook, Slice, public_prices
from ...hardware.prices import listed_zones
from ..search.scoring import Scores
from .spot import SECONDS_PER_DAY, Preemption

ON_DEMAND = "on_demand"
SPOT = "spot"
RESERVED = "reserved"  # tiers of your own, such as "reserved-1y", begin with it

Numbers = Any  # a number or an array of them


@dataclass(frozen=True)
class Market:
    """Where prices come from, and which of them count.

    Attributes:
        book: Rates to look prices up in.
        tier: "on_demand", "spot", or a tier of your own rates such as "reserved-1y".
        regions: Where it may run; empty is anywhere.
        preemption: What spot capacity does to a run.
    """

    book: PriceBook
    tier: str = ON_DEMAND
    regions: tuple[str, ...] = ()
    preemption: Preemption = field(default_factory=Preemption)

    @classmethod
    def asked(
        cls,
        *,
        spot: bool = False,
        tier: str | None = None,
        regions: Sequence[str] = (),
        rates: Mapping[str, Any] | str | Path | None = None,
        preemption: Preemption | None = None,
    ) -> "Market":
        """The market in the words of a plan; public prices, and rates of your own over them.

        Raises:
            ConfigError: `spot` and another tier are asked for at once, or the rates make no sense.
        """
        if spot and tier not in (None, SPOT):
            raise ConfigError(f"spot and tier='{tier}' exclude each other; give one of them.")
        book = public_prices() if rates is None else public_prices().with_rates(rates)
        named = (region for name in regions for region in book.regions_of(name))
        return cls(
            book,
            tier=SPOT if spot else tier or ON_DEMAND,
            regions=tuple(dict.fromkeys(named)),
            preemption=preemption or Preemption(),
        )

    def quote(self, on: Slice) -> tuple[Figure, str | None]:
        """USD a chip-hour, and in which region; the cheapest of those allowed."""
        if not self.regions:
            region = self.book.cheapest_region(on, tier=self.tier)
            return self.book.quote(on, tier=self.tier), region
        quotes = [
            (self.book.quote(on, region=region, tier=self.tier), region) for region in self.regions
        ]
        known = [quote for quote in quotes if quote[0].value is not None]
        if not known:
            return quotes[0][0], None
        return min(known, key=lambda quote: quote[0].value or 0.0)

    def launch_terms(self, on: Slice) -> dict[str, Any]:
        """Return the keys of a job's `launch:` section that make a launch cost what was quoted.

        Zones are those of the quoted region, then of other regions that were asked for and cost
        no more. The price cap is left out where a launch could not compare it: no list price is
        known, or the rate is the user's own.
        """
        price, region = self.quote(on)
        terms: dict[str, Any] = {}
        if self.tier == SPOT:
            terms["spot"] = True
        elif self.tier.startswith(RESERVED):
            terms["reserved"] = True
        others = [
            name
            for name in self.regions
            if self._price_in(name, on) <= (math.inf if price.value is None else price.value)
        ]
        regions = dict.fromkeys(filter(None, (region, *others)))
        zones = [zone for name in regions for zone in listed_zones(on, name)]
        if zones:
            terms["zones"] = zones
        if zones and price.value is not None and price.origin != "user":
            terms["max_price_per_hour"] = _up_to_cents(price.value * on.chips)
        return terms

    def _price_in(self, region: str, on: Slice) -> float:
        price = self.book.quote(on, region=region, tier=self.tier).value
        return math.inf if price is None else price


def _up_to_cents(usd: float) -> float:
    """Return an amount in whole cents that is no less; rounding noise adds no cent."""
    return math.ceil(round(usd * 100, 6)) / 100


@dataclass(frozen=True)
class Costs:
    """Money and time of the whole run by candidate; `usd` is NaN where no price is known.

    On spot that leaves no progress `days`, `chip_hours` and `usd` are infinite.
    """

    days: np.ndarray
    chip_hours: np.ndarray
    usd: np.ndarray
    waste: np.ndarray
    save_s: np.ndarray
    write_s: np.ndarray
    quotes: dict[Slice, tuple[Figure, str | None]]

    @property
    def finishes(self) -> np.ndarray:
        """Whether the run makes progress."""
        return np.isfinite(self.days)

    @property
    def priced(self) -> np.ndarray:
        """Whether a price is known."""
        return ~np.isnan(self.usd)


def cost_of(scores: Scores, market: Market, *, tokens: float) -> Costs:
    """What training on `tokens` tokens takes and costs, preemption's waste included on spot."""
    candidates = scores.candidates
    where = [mesh.slice for mesh in candidates.meshes]
    quotes = {on: market.quote(on) for on in dict.fromkeys(where)}
    host = {on: host_bytes_per_s(on) for on in quotes}
    state: Any = scores.memory.weights + scores.memory.optimizer
    save_s = state / candidates.of_mesh([host[on] for on in where])
    write_s = market.preemption.write_s(scores.saved_bytes)
    waste = np.zeros(len(candidates))
    if market.tier == SPOT:
        waste = market.preemption.waste(
            save_s, candidates.num_slices, write_s=write_s, step_s=scores.step_time_s
        )
    # A run is whole steps.
    seconds = run_s(np.ceil(tokens / scores.tokens_per_step), scores.step_time_s, waste)
    chip_hours = seconds / 3600 * candidates.chips
    prices = [quotes[on][0].value for on in where]
    rate = candidates.of_mesh([np.nan if price is None else price for price in prices])
    return Costs(
        days=seconds / SECONDS_PER_DAY,
        chip_hours=chip_hours,
        usd=chip_hours * rate,
        waste=waste,
        save_s=save_s,
        write_s=write_s,
        quotes=quotes,
    )


def run_s(steps: Numbers, step_s: Numbers, waste: Numbers) -> Numbers:
    """Seconds of a run, of whose time a share is wasted; without end where all of it is."""
    with np.errstate(divide="ignore"):
        return np.asarray(steps * step_s, float) / (1.0 - np.asarray(waste))


def host_bytes_per_s(on: Slice) -> float:
    """An asynchronous save holds the step up while state goes to the host."""
    from ...compiler.timeline.machine import Machine

    return Machine.of(on).host_bytes_per_s
