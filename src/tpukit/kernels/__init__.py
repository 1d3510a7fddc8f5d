"""Ops for TPU: one folder each, every one with a reference, a Pallas kernel and its gradient."""

from .decorator import TpuKernel as TpuKernel
from .decorator import register_tpu_op as register_tpu_op
from .decorator import tpu_kernel as tpu_kernel
from .dispatch import dispatch as dispatch
from .dispatch import dispatch_with_gradient as dispatch_with_gradient
from .dispatch import memory_efficient as memory_efficient

# A function takes the name of its folder here, so it must be imported, not found on first use.
from .layer_norm.api import layer_norm as layer_norm
from .op import Blocks as Blocks
from .op import BlockSizes as BlockSizes
from .op import KernelCase as KernelCase
from .op import Op as Op
from .precision import PrecisionConfig as PrecisionConfig
from .registry import get_tpu_op as get_tpu_op
from .registry import list_tpu_ops as list_tpu_ops
from .registry import unregister_tpu_op as unregister_tpu_op
from .rms_norm.api import rms_norm as rms_norm
from .rope.api import rope as rope
from .rope.frequencies import RopeScaling as RopeScaling
from .rope.frequencies import rope_frequencies as rope_frequencies
from .rope.tables import rope_tables as rope_tables

__all__ = [
    "BlockSizes",
    "Blocks",
    "KernelCase",
    "Op",
    "PrecisionConfig",
    "RopeScaling",
    "TpuKernel",
    "dispatch",
    "dispatch_with_gradient",
    "get_tpu_op",
    "layer_norm",
    "list_tpu_ops",
    "memory_efficient",
    "register_tpu_op",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "rope_tables",
    "tpu_kernel",
    "unregister_tpu_op",
]
