"""`TPUConfig` and the root of its errors, where document 001 imports them from."""

from .errors import TPUError as TPUError
from .job.config import TPUConfig as TPUConfig

__all__ = ["TPUConfig", "TPUError"]
