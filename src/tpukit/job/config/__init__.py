"""Configuration: `TPUConfig` and where its values come from."""

from ..sources import Origin as Origin
from ..sources import presets as presets
from .results import MemoryConfig as MemoryConfig
from .results import PerformanceMetrics as PerformanceMetrics
from .sections import TPUVersion as TPUVersion
from .tpu import TPUConfig as TPUConfig

__all__ = [
    "MemoryConfig",
    "Origin",
    "PerformanceMetrics",
    "TPUConfig",
    "TPUVersion",
    "presets",
]
