"""Prices per chip-hour: dated list prices by region and tier, and rates of your own over them."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from ..errors import ConfigError, did_you_mean
from ..plain_data import MOST_YAML_BYTES, JsonMapping, JsonObject, parse_yaml, read_limited
from ..shown import Facts
from .catalog import get_chip, list_chips
from .figure import Figure
from .slice import Slice

UNIT = "USD/chip-h"
TIERS = ("on_demand", "spot")
ANY_REGION = "*"
MOST_USD = 10_000
_RATE_KEYS = ("generation", "region", "tier", "usd_per_chip_h")


@dataclass(frozen=True, kw_only=True)
class Rate(Facts):
    """The price of one chip for an hour, in one region, on one tier.

    v2 and v3 have other prices in multi-host slices, so `min_chips` and `max_chips` bound the
    slices that a rate is for. `region` is "*" for a rate of your own that applies everywhere.
    """

    generation: str
    region: str
    tier: str
    price: Figure
    min_chips: int = 1
    max_chips: int | None = None
    zones: tuple[str, ...] = ()
    _facts = "generation region tier min_chips max_chips zones price"

    def covers(self, chips: int) -> bool:
        """Whether the rate applies to a slice with this many chips."""
        return self.min_chips <= chips and (self.max_chips is None or chips <= self.max_chips)


@dataclass(frozen=True)
class PriceBook:
    """A collection of rates, in which prices are looked up."""

    rates: tuple[Rate, ...]
    refusals: Mapping[tuple[str, str], str]

    def find(
        self,
        generation: str | None = None,
        *,
        region: str | None = None,
        tier: str | None = None,
    ) -> tuple[Rate, ...]:
        """Return the rates that match; an argument that is left out matches every rate.

        Raises:
            ConfigError: No rate has that region or tier; the message names the nearest.
        """
        wanted = get_chip(generation).name if generation else None
        if tier is not None:
            self._check("tier", tier, {rate.tier for rate in self.rates})
        regions = None if region is None else (*self.regions_of(region), ANY_REGION)
        return tuple(
            rate
            for rate in self.rates
            if wanted in (None, rate.generation)
            and (regions is None or rate.region in regions)
            and tier in (None, rate.tier)
        )

    def regions_of(self, name: str) -> tuple[str, ...]:
        """Return the region with a name, or all regions that begin with it.

        For example, "europe" is every European region, and "us-east" is us-east1, us-east4 and
        us-east5. A book with a rate for every region takes any name.

        Raises:
            ConfigError: No region has that name or begins with it; the message names the nearest.
        """
        known = {rate.region for rate in self.rates} | {at for _, at in self.refusals}
        wanted = name.strip().lower()
        if wanted in known:
            return (wanted,)
        found = sorted(region for region in known if wanted and region.startswith(wanted))
        if found:
            return tuple(found)
        zoned = next((rate.region for rate in self.rates if wanted in rate.zones), "")
        if zoned:
            raise ConfigError(f"{name!r} is a zone, but a region is expected; write {zoned}.")
        if ANY_REGION not in known:
            self._check("region", name, known)
        return (name,)

    def quote(self, of: Slice, *, region: str | None = None, tier: str = "on_demand") -> Figure:
        """Return USD per chip-hour for a slice, in `region` or else in the cheapest region.

        The figure is missing, with the reason, if no price is known.
        """
        rates = self._covering(of, region, tier)
        if rates:
            return rates[0].price
        reason = self.why_none(of.chip.name, region=region, tier=tier)
        return Figure.missing(UNIT, f"{of}: {reason}")

    def cheapest_region(self, of: Slice, *, tier: str = "on_demand") -> str | None:
        """Return the region where the slice costs least on a tier; None if no price is known."""
        rates = self._covering(of, None, tier)
        return rates[0].region if rates else None

    def cost_per_hour(
        self, of: Slice, *, region: str | None = None, tier: str = "on_demand"
    ) -> Figure:
        """Return USD per hour for all chips of the slice or slices."""
        return self.quote(of, region=region, tier=tier).scaled(of.chips, unit="USD/h")

    def why_none(self, generation: str | None, *, region: str | None, tier: str | None) -> str:
        """Return why no price is listed, and the regions that have one."""
        name = get_chip(generation).name if generation else ""
        refused = self.refusals.get((name, region or ""))
        if refused:
            return f"no price in {region}: {refused}."
        offered = sorted({rate.region for rate in self.find(generation, tier=tier)})
        if not offered:
            return "no public list price is known; supply a rate of your own."
        return f"not listed; {name or 'other'} prices exist in {', '.join(offered)}."

    def with_rates(self, rates: JsonMapping | str | Path) -> "PriceBook":
        """Return this book with rates of your own, which replace listed ones.

        Args:
            rates: A mapping, or a YAML file, of the form
                `{source: …, date: …, rates: [{generation, region, tier, usd_per_chip_h}, …]}`.
                `region` may be "*"; `tier` may be a name of your own, such as "reserved-1y".
        """
        own = read_rates(rates)
        kept = (rate for rate in self.rates if not any(_shadows(mine, rate) for mine in own))
        return PriceBook((*own, *kept), self.refusals)

    def _covering(self, of: Slice, region: str | None, tier: str) -> list[Rate]:
        found = self.find(of.chip.name, region=region, tier=tier)
        covering = [rate for rate in found if rate.covers(of.chips_per_slice)]
        if region is None:
            # Of regions that cost the same, the one with most zones is likeliest to have room.
            covering.sort(key=lambda rate: (rate.price.value or math.inf, -len(rate.zones)))
        return covering

    @staticmethod
    def _check(what: str, seen: str, known: set[str]) -> None:
        if seen not in known:
            raise ConfigError(
                f"No price has {what} {seen!r}; known are {', '.join(sorted(known))}."
                + did_you_mean(seen, known)
            )


@cache
def public_prices() -> PriceBook:
    """Return the published list prices; spot prices change, so see the date."""
    text = (resources.files("tpukit.hardware") / "data" / "prices.json").read_text("utf-8")
    data = json.loads(text)
    rates = _listed_rates(data)
    for chip in list_chips():
        if chip.list_prices:
            rates += _listed_rates(chip.list_prices, generation=chip.name)
    refusals = {
        (entry["generation"], region): entry["reason"]
        for entry in data["rejected"]
        for region in entry["regions"]
    }
    return PriceBook(tuple(rates), refusals)


def _listed_rates(data: JsonMapping, **shared: str) -> list[Rate]:
    rows: list[JsonObject] = [{**shared, **row} for row in data["rates"]]
    return [
        Rate(
            generation=entry["generation"],
            region=entry["region"],
            tier=tier,
            price=Figure(entry[tier], UNIT, "third-party", data["source"], data["date"]),
            min_chips=entry.get("min_chips", 1),
            max_chips=entry.get("max_chips"),
            zones=tuple(entry["zones"]),
        )
        for entry in rows
        for tier in TIERS
        if tier in entry
    ]


def listed_zones(of: Slice, region: str) -> tuple[str, ...]:
    """Return the zones of a region that offer a slice, by the public list of prices."""
    found = (
        zone
        for rate in public_prices().rates
        if (rate.generation, rate.region) == (of.chip.name, region)
        and rate.covers(of.chips_per_slice)
        for zone in rate.zones
    )
    return tuple(dict.fromkeys(found))


def read_rates(rates: JsonMapping | str | Path) -> tuple[Rate, ...]:
    """Read rates of your own from a mapping or a YAML file; see `PriceBook.with_rates`."""
    if isinstance(rates, (str, Path)):
        try:
            documents = parse_yaml(read_limited(rates, MOST_YAML_BYTES).decode())
        except OSError as error:
            raise ConfigError(
                f"The rates file {rates} cannot be read: {error.strerror}."
            ) from error
        except ValueError as error:
            raise ConfigError(f"The rates file {rates} is not valid YAML: {error}.") from None
        content = documents[0] if len(documents) == 1 else None
        where = Path(rates).name
    else:
        content, where = rates, "a mapping"
    entries = cast("Any", content).get("rates") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"Rates from {where} need a list under 'rates', each with {', '.join(_RATE_KEYS)}."
        )
    header = cast("JsonMapping", content)
    source = str(header.get("source", f"rates supplied by you ({where})"))
    date = str(header.get("date", ""))
    return tuple(
        _own_rate(entry, number, source, date)
        for number, entry in enumerate(cast("list[Any]", entries), start=1)
    )


def _shadows(own: Rate, listed: Rate) -> bool:
    """Whether a rate of your own replaces a listed one."""
    same = (own.generation, own.tier) == (listed.generation, listed.tier)
    return same and own.region in (listed.region, ANY_REGION)


def _own_rate(entry: object, number: int, source: str, date: str) -> Rate:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"Rate {number} is {entry!r}; expected {', '.join(_RATE_KEYS)}.")
    fields = cast("JsonMapping", entry)
    for key in fields:
        if key not in _RATE_KEYS:
            raise ConfigError(
                f"Rate {number} has an unknown key {key!r}; expected {', '.join(_RATE_KEYS)}."
                + did_you_mean(str(key), _RATE_KEYS)
            )
    price = fields.get("usd_per_chip_h")
    valid = isinstance(price, (int, float)) and not isinstance(price, bool)
    if not valid or not 0 < float(cast("float", price)) <= MOST_USD:
        raise ConfigError(
            f"Rate {number} has usd_per_chip_h {price!r}; expected a positive number of dollars, "
            f"{MOST_USD:,} at most."
        )
    return Rate(
        generation=get_chip(str(fields.get("generation", ""))).name,
        region=str(fields.get("region", ANY_REGION)),
        tier=str(fields.get("tier", "on_demand")),
        price=Figure(float(cast("float", price)), UNIT, "user", source, date),
    )
