"""What the compiler is told on a platform that is no TPU.

On one GPU, measured on an H200 with a 1.14 B-parameter transformer (`benchmarks/train_h200.py`):
XLA's Triton products cost 1 % where cuBLAS has all of them; and cutting weights out of their stack
inside a product keeps XLA from trying cuBLAS's algorithms for it, 2 ms of a step of 375.

Several devices of one CPU share its threads. XLA starts collectives that do not depend on each
other in any order, so one device can wait in the first for a thread that another holds in the
second; after 40 s the process is aborted. With one thread a device keeps the program's order.
"""

from typing import Any

import jax

from ..hardware.target import on_one_gpu

GPU_OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_dynamic_slice_fusion": False,
}
SHARED_CPU_OPTIONS = {"xla_cpu_multi_thread_eigen": False}


def compiler_options() -> dict[str, Any] | None:
    """Options for a step's compile on what is here; None where the usual ones are best."""
    if on_one_gpu():
        return dict(GPU_OPTIONS)
    if jax.default_backend() == "cpu" and jax.local_device_count() > 1:
        return dict(SHARED_CPU_OPTIONS)
    return None
