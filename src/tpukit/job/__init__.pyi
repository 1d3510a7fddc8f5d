# Written by `make format` from the list in __init__.py.

from .config import TPUConfig as TPUConfig
from .job import Job as Job
from .reading import read_job as read_job
from .sections import TPUVersion as TPUVersion
from .step import JobStep as JobStep
from .step import build_step as build_step
from .train import TrainingSettings as TrainingSettings

__all__ = [
    "Job",
    "JobStep",
    "TPUConfig",
    "TPUVersion",
    "TrainingSettings",
    "build_step",
    "read_job",
]
