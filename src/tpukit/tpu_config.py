"""`TPUConfig` and the root of its errors, under the names of document 001."""

from .errors import TPUError as TPUError
from .job.config import TPUConfig as TPUConfig

__all__ = ["TPUConfig", "TPUError"]
