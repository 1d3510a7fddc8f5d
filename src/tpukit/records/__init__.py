"""What a run leaves and shows: metrics, events, each host's steps, progress, goodput, hooks."""

from ..lazy import lazy_names

HOMES = {
    ".events": (
        "Event",
        "read_events",
    ),
    ".hooks": (
        "TensorBoardHook",
        "TrainingHook",
        "WandbHook",
    ),
    ".ledger": ("Goodput",),
    ".metrics": ("read_metrics",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
