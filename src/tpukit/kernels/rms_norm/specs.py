"""The RMS-norm op: its shapes, blocks and implementations."""

import jax
import jax.numpy as jnp

from ..dispatch import with_gradient
from ..op import PALLAS_TPU, REFERENCE, KernelCase, Op
from ..row_norm import block_space, bucket, default_blocks, vmem_bytes
from . import reference
from .api import OP_NAME, PASSES, rms_norm


def case(rows: int, width: int, dtype: str = "bfloat16") -> KernelCase:
    """Rows with a float32 scale, as training keeps them."""
    x = jax.ShapeDtypeStruct((rows, width), jnp.dtype(dtype))
    line = jax.ShapeDtypeStruct((width,), jnp.float32)
    return KernelCase(f"{dtype}_{rows}x{width}", (x, line))


OP = Op(
    name=OP_NAME,
    function=rms_norm,
    implementations={
        PALLAS_TPU: with_gradient(OP_NAME, PASSES, PALLAS_TPU),
        REFERENCE: reference.rms_norm,
    },
    cases=(
        case(1024, 1024),
        case(300, 1000, "float32"),
        case(8192, 4096),
        case(8192, 8192),
        case(16384, 2048),
    ),
    bucket=bucket,
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    differentiable=(0, 1),
)
