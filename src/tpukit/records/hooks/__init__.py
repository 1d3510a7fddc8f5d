"""Hooks: three methods that see a run start, every record it writes, and its end."""

from .hook import TrainingHook as TrainingHook
from .hook import make_hooks as make_hooks
from .tensorboard import TensorBoardHook as TensorBoardHook
from .wandb import WandbHook as WandbHook

__all__ = ["TensorBoardHook", "TrainingHook", "WandbHook", "make_hooks"]
