"""The exceptions of document 002, where it imports them from; `tpukit.errors` is their home."""

from ..errors import TPUBackendError as TPUBackendError
from ..errors import TPUCacheError as TPUCacheError
from ..errors import TPUCheckpointError as TPUCheckpointError
from ..errors import TPUDeviceError as TPUDeviceError
from ..errors import TPUDistributedError as TPUDistributedError
from ..errors import TPUMemoryError as TPUMemoryError
from ..errors import TPUMemoryPoolError as TPUMemoryPoolError
from ..errors import TPUModelError as TPUModelError
from ..errors import TPUNotAvailableError as TPUNotAvailableError
from ..errors import TPUOptimizationError as TPUOptimizationError
from ..errors import TPUOutOfMemoryError as TPUOutOfMemoryError
from ..errors import TPUValidationError as TPUValidationError
from ..errors import XLACompilationError as XLACompilationError
from ..errors import XLARuntimeError as XLARuntimeError

__all__ = [
    "TPUBackendError",
    "TPUCacheError",
    "TPUCheckpointError",
    "TPUDeviceError",
    "TPUDistributedError",
    "TPUMemoryError",
    "TPUMemoryPoolError",
    "TPUModelError",
    "TPUNotAvailableError",
    "TPUOptimizationError",
    "TPUOutOfMemoryError",
    "TPUValidationError",
    "XLACompilationError",
    "XLARuntimeError",
]
