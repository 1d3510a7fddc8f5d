# Written by `make format` from the list in __init__.py.

from .life import PodLife as PodLife
from .life import PodLives as PodLives
from .manager import SpotManager as SpotManager
from .ranking import ZoneRanking as ZoneRanking
from .strategy import BiddingStrategy as BiddingStrategy

__all__ = [
    "BiddingStrategy",
    "PodLife",
    "PodLives",
    "SpotManager",
    "ZoneRanking",
]
