"""`Job`, the document that describes a training job, and the step built from it."""

from ..lazy import lazy_names

HOMES = {
    ".config": ("TPUConfig",),
    ".job": ("Job",),
    ".reading": ("read_job",),
    ".sections": ("TPUVersion",),
    ".step": ("JobStep", "build_step"),
    ".train": ("TrainingSettings",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
