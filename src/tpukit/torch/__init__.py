"""PyTorch on TPUs: prepare, compile, check, train and save an `nn.Module` (document 002)."""

from ..lazy import lazy_names

HOMES = {
    ".backend": ("TPUBackend",),
    ".train_step": ("FusedStep",),
    ".optimizing": ("OptimizationResult", "TPUOptimizer"),
    ".config": (
        "KernelPyTorchConfig",
        "TorchTPUConfig",
    ),
    ".devices": (
        "FoundDevice",
        "TorchTPU",
        "XLADeviceManager",
        "detect_torch_tpu",
        "find_device",
    ),
    ".compiling.compiled_model": ("CompiledModel",),
    ".compiling.compiler": ("XLACompiler",),
    ".lru": (
        "CacheStats",
        "LRUCache",
    ),
    ".memory_pools": ("AllocationRecord",),
    ".memory_manager": ("MemoryStats", "TPUMemoryManager"),
    ".distributed": (
        "XLADistributedTraining",
        "XLAOptimizations",
        "create_xla_integration",
    ),
    ".handover": (
        "Handover",
        "write_handover",
    ),
    "..job.sections": ("TPUVersion",),
    "..job.config": ("TPUConfig",),
    "..errors": (
        "TPUBackendError",
        "TPUDistributedError",
        "TPUMemoryError",
        "TPUMemoryPoolError",
        "TPUNotAvailableError",
        "TPUOptimizationError",
        "TPUOutOfMemoryError",
        "TPUValidationError",
        "XLACompilationError",
    ),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
