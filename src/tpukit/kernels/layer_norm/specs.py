"""The layer-norm op: its shapes, blocks and implementations."""

import jax
import jax.numpy as jnp

from ..dispatch import with_gradient
from ..op import PALLAS_TPU, REFERENCE, KernelCase, Op
from ..row_norm import block_space, bucket, default_blocks, vmem_bytes
from . import reference
from .api import OP_NAME, PASSES, layer_norm


def case(rows: int, width: int, dtype: str = "bfloat16") -> KernelCase:
    """Rows with float32 scale and bias, as training keeps them."""
    x = jax.ShapeDtypeStruct((rows, width), jnp.dtype(dtype))
    line = jax.ShapeDtypeStruct((width,), jnp.float32)
    return KernelCase(f"{dtype}_{rows}x{width}", (x, line, line))


OP = Op(
    name=OP_NAME,
    function=layer_norm,
    implementations={
        PALLAS_TPU: with_gradient(OP_NAME, PASSES, PALLAS_TPU),
        REFERENCE: reference.layer_norm,
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
    differentiable=(0, 1, 2),
)
