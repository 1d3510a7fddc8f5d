# Written by `make format` from the list in __init__.py.

from .config import TPUConfig as TPUConfig
from .config import TPUVersion as TPUVersion
from .job import Plan as Plan
from .train import TrainingSettings as TrainingSettings

__all__ = [
    "Plan",
    "TPUConfig",
    "TPUVersion",
    "TrainingSettings",
]
