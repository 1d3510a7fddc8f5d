"""The grouped matmul op: its implementations, and the shapes it is judged at."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...registry.op import KernelCase, Op
from .api import IMPLEMENTATIONS, OP_NAME, SPLITS, TRITON, grouped_matmul
from .blocks import block_space, default_blocks, vmem_bytes


def _case(name: str, rows: int, width: int, columns: int, groups: int) -> KernelCase:
    return KernelCase(
        name,
        (
            jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
            jax.ShapeDtypeStruct((groups, width, columns), jnp.bfloat16),
            jax.ShapeDtypeStruct((groups,), jnp.int32),
        ),
    )


def even_groups(case: KernelCase) -> dict[int, Any]:
    """Every group has as many rows, or one more."""
    rows, groups = case.arguments[0].shape[0], case.arguments[2].size
    return {2: np.full(groups, rows // groups, np.int32) + (np.arange(groups) < rows % groups)}


OP = Op(
    name=OP_NAME,
    function=grouped_matmul,
    implementations=IMPLEMENTATIONS,
    cases=(
        _case("small", 512, 256, 384, 4),
        _case("mixtral_8x7b", 8192, 4096, 14336, 8),
        _case("qwen3_30b_a3b", 131072, 2048, 768, 128),
        _case("deepseek_v3_16_experts", 131072, 7168, 2048, 16),
    ),
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    on_gpu=TRITON,
    differentiable=(0, 1),
    values=even_groups,
    splits=SPLITS,
)
