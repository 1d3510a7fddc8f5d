"""The gating op: its implementations, and the shapes it is judged at."""

from functools import partial

import jax
import jax.numpy as jnp

from ...registry.op import KernelCase, Op
from .api import OP_NAME, SELECTIONS, SPLITS, moe_gating
from .blocks import block_space, bucket, default_blocks, vmem_bytes


def _case(name: str, tokens: int, num_experts: int, k: int) -> KernelCase:
    return KernelCase(name, (jax.ShapeDtypeStruct((tokens, num_experts), jnp.float32),), {"k": k})


OP = Op(
    name=OP_NAME,
    function=moe_gating,
    implementations={name: partial(moe_gating, implementation=name) for name in SELECTIONS},
    cases=(
        _case("small", 1024, 16, 2),
        _case("mixtral_8x7b", 8192, 8, 2),
        _case("qwen3_30b_a3b", 16384, 128, 8),
        _case("deepseek_v3", 16384, 256, 8),
    ),
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    bucket=bucket,
    splits=SPLITS,
)
