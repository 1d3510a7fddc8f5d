"""The flash-attention op: its shapes, blocks and implementations."""

from typing import Any

import jax
import jax.numpy as jnp

from ...registry.op import PALLAS_TPU, REFERENCE, KernelCase, Op
from . import reference
from .api import CUDNN, flash_attention
from .blocks import block_space, bucket, default_blocks, vmem_bytes
from .cudnn_gpu import cudnn_attention
from .differentiation import OP_NAME, SPLITS, XLA, implementation


def case(
    tokens: int,
    *,
    heads: int = 8,
    kv_heads: int = 8,
    width: int = 128,
    dtype: str = "bfloat16",
    batch: int = 1,
    causal: bool = True,
    window: int | None = None,
) -> KernelCase:
    """Self-attention over `tokens`, causal unless it is told otherwise, as in a decoder."""
    options: dict[str, Any] = {"causal": causal}
    kind = "causal" if causal else "full"
    if window is not None:
        options["window"] = window
        kind = f"window{window}" if causal else f"full_window{window}"
    grouped = "" if heads == kv_heads else f"_gqa{heads}_{kv_heads}"
    q, k = (
        jax.ShapeDtypeStruct((batch, tokens, n, width), jnp.dtype(dtype)) for n in (heads, kv_heads)
    )
    return KernelCase(f"{kind}_{tokens}x{width}{grouped}_{dtype}", (q, k, k), options)


OP = Op(
    name=OP_NAME,
    function=flash_attention,
    implementations={
        PALLAS_TPU: implementation(PALLAS_TPU),
        XLA: implementation(XLA),
        CUDNN: cudnn_attention,
        REFERENCE: reference.attention,
    },
    cases=(
        case(512, heads=2, kv_heads=2),
        case(300, heads=2, kv_heads=1, width=64, dtype="float32", causal=False),
        case(4096),
        case(8192),
        case(4096, heads=32, kv_heads=8),
        case(4096, window=1024),
        case(2048),
        case(4096, width=256),
    ),
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    on_gpu=CUDNN,
    differentiable=(0, 1, 2),
    bucket=bucket,
    splits=SPLITS,
)
