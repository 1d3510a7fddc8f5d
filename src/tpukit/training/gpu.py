"""What one GPU wants that a TPU does not: layers unrolled, and the vendor's matrix products.

Measured on one H200 with a 1.14 B-parameter transformer (`benchmarks/train_h200.py`): unrolled
layers are faster than a scan, because the gradients of a scan are copied into their stack; XLA's
Triton products cost 1 % where cuBLAS has all of them; and cutting weights out of their stack inside
a product keeps XLA from trying cuBLAS's algorithms for it, 2 ms of a step of 375.
"""

from typing import Any

from ..hardware.target import on_one_gpu

COMPILER_OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_dynamic_slice_fusion": False,
}


def compiler_options() -> dict[str, Any] | None:
    """Options for the step's compile on what is here; None where the usual ones are best."""
    return dict(COMPILER_OPTIONS) if on_one_gpu() else None
