"""PyTorch modules as pure jax functions, through torchax; only whoever passes one needs torch."""

from .kind import TORCH as TORCH

__all__ = ["TORCH"]
