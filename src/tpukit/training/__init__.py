"""Training: trainer, data, checkpoints, failure handling."""

from ..lazy import lazy_names

HOMES = {
    ".batches": ("BatchSource",),
    ".checkpoint": ("TPUCheckpointer",),
    ".data": ("open_data",),
    ".evaluation": ("Evaluation",),
    ".failure": (
        "ExitCode",
        "HangWatchdog",
        "LossGuard",
        "PreemptionGuard",
    ),
    ".recompile": ("find_changes",),
    ".result": ("TrainingResult",),
    ".trainer": ("TPUTrainer",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
