"""The cross-entropy op: its implementations, and the shapes it is judged at."""

import jax
import jax.numpy as jnp

from ...registry.op import KernelCase, Op
from .api import IMPLEMENTATIONS, OP_NAME, SPLITS, XLA, cross_entropy
from .blocks import block_space, default_blocks, vmem_bytes


def _case(name: str, tokens: int, width: int, vocab: int) -> KernelCase:
    return KernelCase(
        name,
        (
            jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16),
            jax.ShapeDtypeStruct((width, vocab), jnp.bfloat16),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
        ),
    )


OP = Op(
    name=OP_NAME,
    function=cross_entropy,
    implementations=IMPLEMENTATIONS,
    cases=(
        _case("small", 256, 512, 1000),
        _case("llama3_8b_2048", 2048, 4096, 128256),
        _case("llama3_8b_8192", 8192, 4096, 128256),
        _case("gemma3_12b_4096", 4096, 3840, 262144),
        _case("qwen3_8b_4096", 4096, 4096, 151936),
    ),
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    on_gpu=XLA,
    differentiable=(0, 1),
    splits=SPLITS,
)
