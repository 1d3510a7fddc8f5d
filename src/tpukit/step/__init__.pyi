# Written by `make format` from the list in __init__.py.

from .optimizer import build_optimizer as build_optimizer
from .optimizer_spec import LearningRate as LearningRate
from .optimizer_spec import OptimizerSpec as OptimizerSpec
from .parts import TrainState as TrainState
from .workload import StepShardings as StepShardings
from .workload import Workload as Workload

__all__ = [
    "LearningRate",
    "OptimizerSpec",
    "StepShardings",
    "TrainState",
    "Workload",
    "build_optimizer",
]
