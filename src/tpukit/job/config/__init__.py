"""`TPUConfig`, the flat view on a job, and where its values come from."""

from .presets import presets as presets
from .results import MemoryConfig as MemoryConfig
from .results import PerformanceMetrics as PerformanceMetrics
from .tpu import TPUConfig as TPUConfig

__all__ = ["MemoryConfig", "PerformanceMetrics", "TPUConfig", "presets"]
