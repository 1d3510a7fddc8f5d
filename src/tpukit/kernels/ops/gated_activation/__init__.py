"""The product of an activated gate and a value, whose gradient is one pass."""

from .api import gated_activation as gated_activation

__all__ = ["gated_activation"]
