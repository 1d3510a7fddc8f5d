# Written by `make format` from the list in __init__.py.

from ..store import PodLife as PodLife
from ..store import PodLives as PodLives
from .manager import SpotManager as SpotManager
from .ranking import BiddingStrategy as BiddingStrategy
from .ranking import ZoneRanking as ZoneRanking

__all__ = [
    "BiddingStrategy",
    "PodLife",
    "PodLives",
    "SpotManager",
    "ZoneRanking",
]
