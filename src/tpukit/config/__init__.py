"""Configuration: `TPUConfig` and where its values come from."""

from .results import MemoryConfig as MemoryConfig
from .results import PerformanceMetrics as PerformanceMetrics
from .sections import TPUVersion as TPUVersion
from .sharding import spec_for_shape as spec_for_shape
from .sources import Origin as Origin
from .sources import presets as presets
from .tpu import TPUConfig as TPUConfig

__all__ = [
    "MemoryConfig",
    "Origin",
    "PerformanceMetrics",
    "TPUConfig",
    "TPUVersion",
    "presets",
    "spec_for_shape",
]
