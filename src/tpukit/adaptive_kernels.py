"""Products that choose their own way, where document 000 imports them from."""

from .kernels.ops.gemm.api import adaptive_matmul as adaptive_matmul

__all__ = ["adaptive_matmul"]
