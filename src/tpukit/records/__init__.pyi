# Written by `make format` from the list in __init__.py.

from .hooks import TensorBoardHook as TensorBoardHook
from .hooks import TrainingHook as TrainingHook
from .hooks import WandbHook as WandbHook
from .ledger import Goodput as Goodput
from .metrics import read_metrics as read_metrics

__all__ = [
    "Goodput",
    "TensorBoardHook",
    "TrainingHook",
    "WandbHook",
    "read_metrics",
]
