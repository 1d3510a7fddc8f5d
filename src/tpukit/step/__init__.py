"""One training step of a model, as pure functions with a sharding for every array."""

from ..lazy import lazy_names

HOMES = {
    ".optimizer": ("build_optimizer",),
    ".optimizer_spec": ("LearningRate", "OptimizerSpec"),
    ".parts": ("TrainState",),
    ".workload": (
        "StepShardings",
        "Workload",
    ),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
