"""State that commands share: wanted and observed pods, attempts, events and spending."""

from .records import PodEvent as PodEvent
from .records import ProviderRecord as ProviderRecord
from .records import WantedPod as WantedPod
from .spend import Spending as Spending
from .store import PodLife as PodLife
from .store import PodLives as PodLives
from .store import Store as Store

__all__ = ["PodEvent", "PodLife", "PodLives", "ProviderRecord", "Spending", "Store", "WantedPod"]
