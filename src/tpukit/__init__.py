"""tpukit: from a laptop to a TPU pod.

Public names load on first use, so `import tpukit` is fast, silent and imports neither jax
nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compiler import CompiledStep as CompiledStep
    from .compiler import compile_for as compile_for
    from .config import TPUConfig as TPUConfig
    from .config import TPUVersion as TPUVersion
    from .errors import TPUError as TPUError
    from .hardware import Chip as Chip
    from .hardware import Figure as Figure
    from .hardware import Slice as Slice
    from .hardware import get_chip as get_chip
    from .hardware import list_chips as list_chips
    from .hardware import list_slices as list_slices
    from .runtime.doctor import diagnose_tpu as diagnose_tpu
    from .runtime.environment import configure_tpu_environment as configure_tpu_environment
    from .runtime.flags import enable_xla_optimizations as enable_xla_optimizations
    from .runtime.flags import set_xla_flags as set_xla_flags
    from .runtime.multihost import MultiHostConfig as MultiHostConfig

__version__ = "0.1.0"

# Which module each public name lives in; the block above says the same to type checkers.
_HOME_OF = {
    "Chip": "hardware",
    "CompiledStep": "compiler",
    "Figure": "hardware",
    "MultiHostConfig": "runtime.multihost",
    "Slice": "hardware",
    "TPUConfig": "config",
    "TPUError": "errors",
    "TPUVersion": "config",
    "compile_for": "compiler",
    "configure_tpu_environment": "runtime.environment",
    "diagnose_tpu": "runtime.doctor",
    "enable_xla_optimizations": "runtime.flags",
    "get_chip": "hardware",
    "list_chips": "hardware",
    "list_slices": "hardware",
    "set_xla_flags": "runtime.flags",
}

__all__ = [
    "Chip",
    "CompiledStep",
    "Figure",
    "MultiHostConfig",
    "Slice",
    "TPUConfig",
    "TPUError",
    "TPUVersion",
    "compile_for",
    "configure_tpu_environment",
    "diagnose_tpu",
    "enable_xla_optimizations",
    "get_chip",
    "list_chips",
    "list_slices",
    "set_xla_flags",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tpukit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
