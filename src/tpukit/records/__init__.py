"""What a run leaves and shows: metrics, progress, throughput, hooks."""

from ..lazy import lazy_names

HOMES = {
    ".hooks": (
        "TensorBoardHook",
        "TrainingHook",
        "WandbHook",
    ),
    ".ledger": ("Goodput",),
    ".metrics": ("read_metrics",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
