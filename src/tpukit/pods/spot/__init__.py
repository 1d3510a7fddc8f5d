"""Spot capacity: which zone to ask, what a useful step costs there, and what not to pay."""

from ...lazy import lazy_names

HOMES = {
    ".life": ("PodLife", "PodLives"),
    ".manager": ("SpotManager",),
    ".ranking": ("ZoneRanking",),
    ".strategy": ("BiddingStrategy",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
