"""The RoPE op: its shapes, blocks and implementations."""

import jax
import jax.numpy as jnp

from ...registry.gradient import with_gradient
from ...registry.op import PALLAS_TPU, REFERENCE, KernelCase, Op
from . import reference
from .api import OP_NAME, PASSES, SPLITS, rope
from .blocks import block_space, bucket, default_blocks, vmem_bytes


def case(batch: int, length: int, heads: int, width: int, *, dtype: str = "bfloat16") -> KernelCase:
    """Heads with tables that the batch shares."""
    x = jax.ShapeDtypeStruct((batch, length, heads, width), jnp.dtype(dtype))
    table = jax.ShapeDtypeStruct((length, width // 2), jnp.float32)
    return KernelCase(f"{dtype}_{batch}x{length}x{heads}x{width}", (x, table, table))


OP = Op(
    name=OP_NAME,
    function=rope,
    implementations={
        PALLAS_TPU: with_gradient(OP_NAME, PASSES, PALLAS_TPU, SPLITS),
        REFERENCE: reference.rope,
    },
    cases=(
        case(1, 512, 4, 128),
        case(1, 512, 4, 64, dtype="float32"),
        case(2, 300, 2, 256),
        case(4, 4096, 32, 128),
        case(4, 4096, 8, 128),
    ),
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    bucket=bucket,
    splits=SPLITS,
)
