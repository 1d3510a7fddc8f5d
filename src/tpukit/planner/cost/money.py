"""Days, chip-hours and dollars of a whole run on every candidate, with preemption on spot."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ...errors import ConfigError
from ...hardware import Figure, PriceBook, Slice, public_prices
from ...hardware.prices import listed_zones
from ...plain_data import JsonMapping, JsonObject
from ...runtime.ranges import Range
from ...shown import Facts
from .scoring import Scores

SECONDS_PER_DAY = 86_400.0
Numbers: TypeAlias = Any
"""A number or an array of them."""
# A run with less progress than this counts as never finishing.
LEAST_PROGRESS = 0.01
MOST_PER_DAY = 1440.0
_NEWTON_STEPS = 6
_MOMENT_S, _NEVER = 1e-6, 1e-12  # instead of nothing, in seconds and times a day
# google/orbax issue 392 (2023): checkpoints of about 200 GB took 38 s to a bucket of Cloud Storage.
STORE_BYTES_PER_S = 200e9 / 38
STORE_SOURCE = "google/orbax issue 392 (2023): 200 GB in 38 s to a Cloud Storage bucket"
_SLOWEST_STORE, _FASTEST_STORE = 1e6, 1e13
_SOURCE = (
    "skypilot-org/skypilot PR 1500 (2022): 7 spot TPU jobs, 42 recoveries in 3 to 4 days, "
    "8.0 h lost together"
)


@dataclass(frozen=True, kw_only=True)
class Preemption(Facts):
    """How often a spot slice is preempted, and how long recovery takes.

    The defaults are the only public record that we know, of small slices in 2022. Capacity differs
    by zone and week, so give your own figures if you have them.

    Attributes:
        per_slice_day: Preemptions per slice and day.
        recovery_s: Seconds from the preemption to the next step.
        source: Source of both.
        store_bytes_per_s: Rate at which all hosts together write a checkpoint.
        store_source: Source of that rate.
    """

    per_slice_day: float = 42 / 7 / 3.5
    recovery_s: float = 8.0 * 3600 / 42
    source: str = _SOURCE
    store_bytes_per_s: float = STORE_BYTES_PER_S
    store_source: str = STORE_SOURCE
    interval = "Young/Daly, a save and its write counted"
    _facts = "per_slice_day recovery_s source store_bytes_per_s store_source interval"

    def __post_init__(self) -> None:
        Range(0, MOST_PER_DAY).check("preemptions per day", self.per_slice_day, unit="of a slice")
        Range(0, SECONDS_PER_DAY).check("recovery", self.recovery_s, unit="seconds")
        store = Range(_SLOWEST_STORE, _FASTEST_STORE)
        store.check("store_bytes_per_s", self.store_bytes_per_s, unit="bytes a second")

    def write_s(self, saved_bytes: Numbers) -> Numbers:
        """Return the seconds until a checkpoint of this size is in the store."""
        return saved_bytes / self.store_bytes_per_s

    def up_s(self, num_slices: Numbers) -> Numbers:
        """Return the mean seconds between preemptions of slices that work together.

        Zero or less if recoveries take the whole day.
        """
        lost = np.maximum(self.per_slice_day * np.asarray(num_slices, float), _NEVER)
        return SECONDS_PER_DAY / lost - self.recovery_s

    def interval_s(
        self, save_s: Numbers, num_slices: Numbers, *, write_s: Numbers = 0.0, step_s: Numbers = 0.0
    ) -> Numbers:
        """Return the optimal seconds between two checkpoints, at least one step and one write.

        Starts from Young's square root, then finds Daly's exact optimum by Newton's method.

        Args:
            save_s: Seconds for which a checkpoint delays a step.
            num_slices: Slices that work together.
            write_s: Seconds until a checkpoint is in the store.
            step_s: Seconds of one step; checkpoints follow whole steps.
        """
        up = np.maximum(self.up_s(num_slices), _MOMENT_S)
        delay = np.maximum(np.add(save_s, write_s), _MOMENT_S) / up
        share = np.minimum(1.0, np.sqrt(2 * delay))
        for _ in range(_NEWTON_STEPS):
            slope = -np.expm1(-(share + delay))
            share = share - (share - slope) / slope
        return np.maximum(np.maximum(share * up, write_s), step_s)

    def progress(
        self, save_s: Numbers, num_slices: Numbers, *, write_s: Numbers = 0.0, step_s: Numbers = 0.0
    ) -> Numbers:
        """Return the share of time that is neither saving, recovering nor repeated work.

        With exponentially distributed times between preemptions, a mean of `exp(-write / up) /
        (exp((interval + save) / up) - 1)` intervals are finished and written.
        """
        up = self.up_s(num_slices)
        interval = self.interval_s(save_s, num_slices, write_s=write_s, step_s=step_s)
        alive = np.maximum(up, _MOMENT_S)
        with np.errstate(over="ignore"):
            kept = interval / np.expm1((interval + np.maximum(save_s, _MOMENT_S)) / alive)
            kept = kept * np.exp(-np.asarray(write_s) / alive)
        return np.where(up > 0, kept / (alive + self.recovery_s), 0.0)

    def waste(
        self, save_s: Numbers, num_slices: Numbers, *, write_s: Numbers = 0.0, step_s: Numbers = 0.0
    ) -> Numbers:
        """Return the share of time without progress; 1 if the run would never finish."""
        kept = self.progress(save_s, num_slices, write_s=write_s, step_s=step_s)
        return np.where(kept < LEAST_PROGRESS, 1.0, 1.0 - kept)

    def why_never(
        self, save_s: float, num_slices: int, *, write_s: float = 0.0, step_s: float
    ) -> str:
        """Return why a run makes no progress, and rates with which half of its time counts."""

        def enough(per_day: float, recovery_s: float) -> bool:
            other = replace(self, per_slice_day=per_day, recovery_s=recovery_s)
            kept = other.progress(save_s, num_slices, write_s=write_s, step_s=step_s)
            return float(kept) >= 0.5

        rate = _most(lambda per_day: enough(per_day, self.recovery_s), self.per_slice_day)
        together = f" each of {num_slices} slices" if num_slices > 1 else " a slice"
        words = (
            f"never finishes: with {self.per_slice_day:,.4g} preemptions a day of{together} and "
            f"{self.recovery_s / 60:.3g} min to be back, no checkpoint interval makes progress. "
            f"Half of the time would count with {rate:.3g} preemptions a day"
        )
        if enough(self.per_slice_day, 0.0):
            recovery = _most(lambda seconds: enough(self.per_slice_day, seconds), self.recovery_s)
            return f"{words}, or back within {recovery / 60:.2g} min"
        whole_s = save_s + write_s
        return f"{words}; no recovery is short enough, each save takes {whole_s:.3g} s"


def _most(does: Callable[[float], bool], high: float) -> float:
    """Return the largest number up to `high` that `does` accepts, by bisection."""
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if does(middle) else (low, middle)
    return low


ON_DEMAND = "on_demand"
SPOT = "spot"
RESERVED = "reserved"  # tiers of your own, such as "reserved-1y", begin with it


@dataclass(frozen=True)
class Market:
    """Price book, tier and regions of a plan.

    Attributes:
        book: The price book.
        tier: "on_demand", "spot", or a tier of your own rates such as "reserved-1y".
        regions: Allowed regions; empty for any.
        preemption: Preemption rates of spot capacity.
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
        rates: JsonMapping | str | Path | None = None,
        preemption: Preemption | None = None,
    ) -> "Market":
        """Return the market from the arguments of `plan`; user rates override public prices.

        Raises:
            ConfigError: `spot` and another tier are both given, or the rates are not valid.
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
        """Return the lowest USD per chip-hour in the allowed regions, and its region."""
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

    def launch_terms(self, on: Slice) -> JsonObject:
        """Return the `launch:` settings with which a launch gets the quoted capacity and price.

        Zones are those of the quoted region, then of other allowed regions at no higher price. The
        price cap is left out if a launch could not compare it, because no list price is known or
        the rate is the user's own.
        """
        price, region = self.quote(on)
        terms: JsonObject = {}
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
    """Return an amount rounded up to whole cents, ignoring rounding noise."""
    return math.ceil(round(usd * 100, 6)) / 100


@dataclass(frozen=True)
class Costs:
    """Money and time of the whole run per candidate; `usd` is NaN without a price.

    `days`, `chip_hours` and `usd` are infinite on spot without progress.
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
    """Return time and cost of training on `tokens` tokens; on spot with preemption."""
    candidates = scores.candidates
    where = [mesh.slice for mesh in candidates.meshes]
    quotes = {on: market.quote(on) for on in dict.fromkeys(where)}
    host = {on: host_bytes_per_s(on) for on in quotes}
    state: Numbers = scores.memory.weights + scores.memory.optimizer
    save_s = state / candidates.of_mesh([host[on] for on in where])
    write_s = market.preemption.write_s(scores.saved_bytes)
    waste = np.zeros(len(candidates))
    if market.tier == SPOT:
        waste = market.preemption.waste(
            save_s, candidates.num_slices, write_s=write_s, step_s=scores.step_time_s
        )
    # Runs have whole steps.
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
    """Return the seconds of a run with a share of wasted time; infinite if all is wasted."""
    with np.errstate(divide="ignore"):
        return np.asarray(steps * step_s, float) / (1.0 - np.asarray(waste))


def host_bytes_per_s(on: Slice) -> float:
    """Return the bytes per second from devices to hosts; a save delays the step that long."""
    from ...compiler.timeline.machine import Machine

    return Machine.of(on).host_bytes_per_s
