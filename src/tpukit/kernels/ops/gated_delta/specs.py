"""The gated delta op: its shapes, blocks and implementations."""

import jax
import jax.numpy as jnp

from ...registry.gradient import with_gradient
from ...registry.op import PALLAS_TPU, REFERENCE, XLA, KernelCase, Op
from . import reference
from .api import OP_NAME, PASSES, SPLITS, gated_delta
from .blocks import block_space, bucket, default_blocks, vmem_bytes


def case(
    batch: int,
    tokens: int,
    key_heads: int,
    heads: int,
    width: int = 128,
    *,
    dtype: str = "bfloat16",
) -> KernelCase:
    """Queries and keys, values as wide as they are, and rates in float32."""
    kind = jnp.dtype(dtype)
    keys = jax.ShapeDtypeStruct((batch, tokens, key_heads, width), kind)
    values = jax.ShapeDtypeStruct((batch, tokens, heads, width), kind)
    rates = jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32)
    name = f"{dtype}_{batch}x{tokens}_{key_heads}on{heads}x{width}"
    return KernelCase(name, (keys, keys, values, rates, rates))


OP = Op(
    name=OP_NAME,
    function=gated_delta,
    implementations={
        PALLAS_TPU: with_gradient(OP_NAME, PASSES, PALLAS_TPU, SPLITS),
        XLA: with_gradient(OP_NAME, PASSES, XLA, SPLITS),
        REFERENCE: reference.gated_delta,
    },
    cases=(
        case(1, 256, 2, 4),
        case(2, 200, 2, 2, 64, dtype="float32"),
        case(1, 4096, 16, 32),
        case(1, 8192, 16, 32),
        case(4, 4096, 16, 32),
    ),
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    differentiable=(0, 1, 2, 3, 4),
    bucket=bucket,
    on_gpu=XLA,
    splits=SPLITS,
)
