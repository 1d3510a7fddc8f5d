"""What must be remembered between commands: pods wanted and seen, attempts, events, money."""

from .records import PodEvent as PodEvent
from .records import ProviderRecord as ProviderRecord
from .records import WantedPod as WantedPod
from .spend import Spending as Spending
from .store import Store as Store

__all__ = ["PodEvent", "ProviderRecord", "Spending", "Store", "WantedPod"]
