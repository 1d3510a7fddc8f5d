"""Spot capacity: rank zones by the cost of a useful step, within a price cap."""

from ...lazy import lazy_names

HOMES = {
    "..store": ("PodLife", "PodLives"),
    ".manager": ("SpotManager",),
    ".ranking": ("BiddingStrategy", "ZoneRanking"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
