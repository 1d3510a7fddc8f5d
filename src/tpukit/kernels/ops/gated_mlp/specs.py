"""The gated feed-forward op: its shapes, blocks and implementations.

Static timing of bfloat16 with width 4096 and hidden width 14336, kernel against XLA, in
microseconds (origin model: `tpukit kernel bench gated_mlp`):

    tokens      v5e            v5p          v6e            7x
      128    441 :  762     162 : 153    263 :  251     121 : 113
     4096   8279 : 8046                 2215 : 1988

XLA feeds the matrix unit better and, but for v5e with few tokens, reads no more: there it wins.
"""

import jax
import jax.numpy as jnp

from ...registry.gradient import with_gradient
from ...registry.op import PALLAS_TPU, REFERENCE, KernelCase, Op
from . import reference
from .api import OP_NAME, PASSES, SPLITS, gated_mlp
from .blocks import block_space, bucket, default_blocks, vmem_bytes


def case(rows: int, width: int, hidden: int, *, dtype: str = "bfloat16") -> KernelCase:
    """Tokens and the three matrices, all of one dtype."""
    kind = jnp.dtype(dtype)
    x = jax.ShapeDtypeStruct((rows, width), kind)
    widen = jax.ShapeDtypeStruct((width, hidden), kind)
    narrow = jax.ShapeDtypeStruct((hidden, width), kind)
    return KernelCase(f"{dtype}_{rows}x{width}x{hidden}", (x, widen, widen, narrow))


OP = Op(
    name=OP_NAME,
    function=gated_mlp,
    implementations={
        PALLAS_TPU: with_gradient(OP_NAME, PASSES, PALLAS_TPU, SPLITS),
        REFERENCE: reference.gated_mlp,
    },
    cases=(
        case(512, 512, 1024),
        case(100, 200, 300, dtype="float32"),
        case(4096, 4096, 14336),
        case(8192, 2048, 8192),
        case(128, 4096, 14336),
    ),
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    differentiable=(0, 1, 2, 3),
    bucket=bucket,
    splits=SPLITS,
)
