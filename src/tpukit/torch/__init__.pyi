# Written by `make format` from the list in __init__.py.

from ..errors import TPUBackendError as TPUBackendError
from ..errors import TPUDistributedError as TPUDistributedError
from ..errors import TPUMemoryError as TPUMemoryError
from ..errors import TPUMemoryPoolError as TPUMemoryPoolError
from ..errors import TPUNotAvailableError as TPUNotAvailableError
from ..errors import TPUOptimizationError as TPUOptimizationError
from ..errors import TPUOutOfMemoryError as TPUOutOfMemoryError
from ..errors import TPUValidationError as TPUValidationError
from ..errors import XLACompilationError as XLACompilationError
from ..job.config import TPUConfig as TPUConfig
from ..job.sections import TPUVersion as TPUVersion
from .backend import TPUBackend as TPUBackend
from .compiling.compiled_model import CompiledModel as CompiledModel
from .compiling.compiler import XLACompiler as XLACompiler
from .config import KernelPyTorchConfig as KernelPyTorchConfig
from .config import TorchTPUConfig as TorchTPUConfig
from .devices import FoundDevice as FoundDevice
from .devices import TorchTPU as TorchTPU
from .devices import XLADeviceManager as XLADeviceManager
from .devices import detect_torch_tpu as detect_torch_tpu
from .devices import find_device as find_device
from .distributed import XLADistributedTraining as XLADistributedTraining
from .distributed import XLAOptimizations as XLAOptimizations
from .distributed import create_xla_integration as create_xla_integration
from .handover import Handover as Handover
from .handover import write_handover as write_handover
from .lru import CacheStats as CacheStats
from .lru import LRUCache as LRUCache
from .memory_manager import MemoryStats as MemoryStats
from .memory_manager import TPUMemoryManager as TPUMemoryManager
from .memory_pools import AllocationRecord as AllocationRecord
from .optimizing import OptimizationResult as OptimizationResult
from .optimizing import TPUOptimizer as TPUOptimizer
from .train_step import FusedStep as FusedStep

__all__ = [
    "AllocationRecord",
    "CacheStats",
    "CompiledModel",
    "FoundDevice",
    "FusedStep",
    "Handover",
    "KernelPyTorchConfig",
    "LRUCache",
    "MemoryStats",
    "OptimizationResult",
    "TPUBackend",
    "TPUBackendError",
    "TPUConfig",
    "TPUDistributedError",
    "TPUMemoryError",
    "TPUMemoryManager",
    "TPUMemoryPoolError",
    "TPUNotAvailableError",
    "TPUOptimizationError",
    "TPUOptimizer",
    "TPUOutOfMemoryError",
    "TPUValidationError",
    "TPUVersion",
    "TorchTPU",
    "TorchTPUConfig",
    "XLACompilationError",
    "XLACompiler",
    "XLADeviceManager",
    "XLADistributedTraining",
    "XLAOptimizations",
    "create_xla_integration",
    "detect_torch_tpu",
    "find_device",
    "write_handover",
]
