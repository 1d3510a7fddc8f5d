"""Matmuls that choose their own implementation, under the names of document 000."""

from .kernels.ops.gemm import adaptive_matmul as adaptive_matmul

__all__ = ["adaptive_matmul"]
