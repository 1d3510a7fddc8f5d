"""The gated-activation op: its implementations, and the shapes it is judged at.

Static timing of the backward pass, bfloat16, 8192 tokens of width 14336, kernel against XLA, in
microseconds (origin model: `benchmarks/kernel_backward.py`):

       v5e           v5p          v6e          7x
    1641 : 1650    499 : 490    809 : 825    462 : 367

XLA is level or wins, and splits the op over a mesh besides: dispatch leaves it to XLA on a TPU.
"""

import jax
import jax.numpy as jnp

from ...registry.gradient import with_gradient
from ...registry.op import KernelCase, Op
from ..rms_norm.blocks import block_space, bucket, default_blocks, vmem_bytes
from .api import OP_NAME, PASSES, SPLITS, TRITON, gated_activation


def case(tokens: int, width: int, *, dtype: str = "bfloat16") -> KernelCase:
    """Gate and value of so many tokens, side by side."""
    both = jax.ShapeDtypeStruct((tokens, 2 * width), jnp.dtype(dtype))
    return KernelCase(f"{dtype}_{tokens}x{width}", (both,))


OP = Op(
    name=OP_NAME,
    function=gated_activation,
    implementations={name: with_gradient(OP_NAME, PASSES, name, SPLITS) for name in PASSES},
    cases=(
        case(512, 1024),
        case(100, 384, dtype="float32"),
        case(8192, 14336),
        case(16384, 2048),
    ),
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    bucket=bucket,
    on_gpu=TRITON,
    splits=SPLITS,
)
