"""Ops for TPU: one folder each, every one with a reference, a Pallas kernel and its gradient."""

from .dispatch import dispatch as dispatch
from .op import Blocks as Blocks
from .op import BlockSizes as BlockSizes
from .op import KernelCase as KernelCase
from .op import Op as Op

__all__ = ["BlockSizes", "Blocks", "KernelCase", "Op", "dispatch"]
