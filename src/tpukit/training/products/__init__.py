"""Matrix products on one NVIDIA GPU: which of cuBLAS's algorithms a step takes."""

from .tuning import ProductTuner as ProductTuner
from .tuning import tuned_options as tuned_options

__all__ = ["ProductTuner", "tuned_options"]
