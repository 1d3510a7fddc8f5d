"""RMS norm of a residual stream: the addition before it and the one behind its gradient fused."""

from .api import residual_norm as residual_norm

__all__ = ["residual_norm"]
