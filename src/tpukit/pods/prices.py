"""What a pod costs an hour by the price catalogue, and caps on it.

No provider's API has a price or a bid: a cap can only be held against a catalogue before asking.
So every answer says how old the catalogue is.
"""

from collections.abc import Sequence
from datetime import UTC, date, datetime

from ..errors import ConfigError, PodUnavailable
from ..hardware.figure import Figure
from ..hardware.prices import PriceBook, public_prices
from .causes import Cause
from .config import PodConfig
from .pod import Tier

UNIT = "USD/h"
# Machines of one's own have no list price.
_OWN_MACHINES = ("local", "ssh")


def price_of(
    config: PodConfig, *, zone: str, provider: str, book: PriceBook | None = None
) -> Figure:
    """USD an hour for a whole pod in a zone; missing, with the reason, where none is known."""
    if provider in _OWN_MACHINES:
        return Figure.missing(UNIT, f"'{provider}' runs on machines of your own.")
    if config.tier is Tier.RESERVED:
        return Figure.missing(UNIT, "reserved capacity costs what your contract says.")
    if not zone:
        return Figure.missing(UNIT, "no zone is named, and prices differ by region.")
    region = zone.rpartition("-")[0] or zone
    try:
        return (book or public_prices()).cost_per_hour(
            config.slice, region=region, tier=config.tier.value
        )
    except ConfigError:
        return Figure.missing(UNIT, f"the catalogue knows no region {region!r}.")


def zones_within_cap(
    config: PodConfig, zones: Sequence[str], *, provider: str, book: PriceBook | None = None
) -> list[str]:
    """Return the zones in which a pod costs no more than its cap, in the same order.

    Raises:
        PodUnavailable: There is none; the message names the cheapest, and the catalogue's age.
    """
    cap = config.max_price_per_hour
    if cap is None or provider in _OWN_MACHINES:
        return list(zones)
    prices = {zone: price_of(config, zone=zone, provider=provider, book=book) for zone in zones}
    known = {zone: price.value for zone, price in prices.items() if price.value is not None}
    within = [zone for zone in zones if known.get(zone, cap + 1) <= cap]
    if within:
        return within
    if known:
        cheapest = min(known, key=lambda zone: known[zone])
        price = prices[cheapest]
        seen = f"the least is ${known[cheapest]:.2f} in {cheapest} ({catalogue_age(price)})"
    else:
        seen = f"no price is known: {next(iter(prices.values())).reason if prices else 'no zone'}"
    raise PodUnavailable(
        f"{config.slice} ({config.tier}) for at most ${cap:.2f} an hour: {seen}. Raise "
        "max_price_per_hour, add zones, or take a smaller slice.",
        cause=Cause.UNPLACEABLE.value,
    )


def catalogue_age(price: Figure, *, today: date | None = None) -> str:
    """Say how old a price is: "prices of 2026-08-21, 87 days old"."""
    try:
        made = date.fromisoformat(price.date[:10])
    except ValueError:
        return f"{price.source or 'no source'}, no date"
    days = ((today or datetime.now(UTC).date()) - made).days
    return f"prices of {made}, {days} days old"
