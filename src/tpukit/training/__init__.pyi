# Written by `make format` from the list in __init__.py.

from .batches import BatchSource as BatchSource
from .checkpoint import TPUCheckpointer as TPUCheckpointer
from .data import open_data as open_data
from .evaluation import Evaluation as Evaluation
from .failure import ExitCode as ExitCode
from .failure import HangWatchdog as HangWatchdog
from .failure import LossGuard as LossGuard
from .failure import PreemptionGuard as PreemptionGuard
from .recompile import find_changes as find_changes
from .result import TrainingResult as TrainingResult
from .trainer import TPUTrainer as TPUTrainer

__all__ = [
    "BatchSource",
    "Evaluation",
    "ExitCode",
    "HangWatchdog",
    "LossGuard",
    "PreemptionGuard",
    "TPUCheckpointer",
    "TPUTrainer",
    "TrainingResult",
    "find_changes",
    "open_data",
]
