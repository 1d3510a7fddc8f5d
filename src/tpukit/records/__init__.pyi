# Written by `make format` from the list in __init__.py.

from .events import Event as Event
from .events import read_events as read_events
from .hooks import TensorBoardHook as TensorBoardHook
from .hooks import TrainingHook as TrainingHook
from .hooks import WandbHook as WandbHook
from .ledger import Goodput as Goodput
from .metrics import read_metrics as read_metrics

__all__ = [
    "Event",
    "Goodput",
    "TensorBoardHook",
    "TrainingHook",
    "WandbHook",
    "read_events",
    "read_metrics",
]
