"""Training: trainer, data, checkpoints, failure handling. Names load on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batches import BatchSource as BatchSource
    from .checkpoint import TPUCheckpointer as TPUCheckpointer
    from .data import open_data as open_data
    from .evaluation import Evaluation as Evaluation
    from .failure import ExitCode as ExitCode
    from .failure import HangWatchdog as HangWatchdog
    from .failure import LossGuard as LossGuard
    from .failure import PreemptionGuard as PreemptionGuard
    from .hooks import TensorBoardHook as TensorBoardHook
    from .hooks import TrainingHook as TrainingHook
    from .hooks import WandbHook as WandbHook
    from .metrics import read_metrics as read_metrics
    from .optimizer import OptimizerSpec as OptimizerSpec
    from .optimizer import build_optimizer as build_optimizer
    from .recompile import find_changes as find_changes
    from .result import TrainingResult as TrainingResult
    from .schedule import LearningRate as LearningRate
    from .settings import TrainingSettings as TrainingSettings
    from .timing import Goodput as Goodput
    from .trainer import TPUTrainer as TPUTrainer

# Which module each name lives in; the block above says the same to type checkers.
_HOMES = {
    "BatchSource": "batches",
    "Evaluation": "evaluation",
    "ExitCode": "failure",
    "Goodput": "timing",
    "HangWatchdog": "failure",
    "LearningRate": "schedule",
    "LossGuard": "failure",
    "OptimizerSpec": "optimizer",
    "PreemptionGuard": "failure",
    "TPUCheckpointer": "checkpoint",
    "TPUTrainer": "trainer",
    "TensorBoardHook": "hooks",
    "TrainingHook": "hooks",
    "TrainingResult": "result",
    "TrainingSettings": "settings",
    "WandbHook": "hooks",
    "build_optimizer": "optimizer",
    "find_changes": "recompile",
    "open_data": "data",
    "read_metrics": "metrics",
}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]  names of the block above


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tpukit.training' has no attribute '{name}'")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
