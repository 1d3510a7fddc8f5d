"""Attention on TPU through jax's splash kernel: blocks of scores that never leave VMEM."""

import math
from functools import lru_cache, partial
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from ...errors import TPUModelError
from ...kernels.ops.flash_attention.pallas_tpu import KEPT_NAME
from .on_mesh import KernelAttention

# Block sizes of the published Trillium recipes; shorter sequences take what divides them.
LARGEST_BLOCK = 2048
SMALLEST_BLOCK = 128
HALF_LANES = 64  # heads of 64 compile and run; nothing smaller was tried


def can_splash(q: jax.Array) -> bool:
    """Whether the kernel's blocks fit queries of this shape."""
    return q.shape[1] % SMALLEST_BLOCK == 0 and q.shape[-1] % HALF_LANES == 0


def _refuse(q: jax.Array) -> None:
    if not can_splash(q):
        raise TPUModelError(
            f"splash attention works on multiples of {SMALLEST_BLOCK} tokens and heads of "
            f"multiples of {HALF_LANES}, and the queries are {q.shape}; change the shape, or use "
            "attention='xla'."
        )


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    *,
    window: int | None,
    interpret: bool,
    fused_backward: bool = True,
) -> jax.Array:
    heads, kv_heads = q.shape[2], k.shape[2]
    kernel = _kernel(q.shape[1], heads // kv_heads, window, interpret, fused_backward)
    by_head = [x.transpose(0, 2, 1, 3) for x in (q * q.shape[-1] ** -0.5, k, v)]
    batch, _, length, width = by_head[0].shape
    grouped = by_head[0].reshape(batch, kv_heads, heads // kv_heads, length, width)
    ids = None if segment_ids is None else splash.SegmentIds(segment_ids, segment_ids)
    over_heads: Any = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    over_batch: Any = jax.vmap(over_heads, in_axes=(0, 0, 0, None if ids is None else 0))
    out = over_batch(grouped, by_head[1], by_head[2], ids)
    return out.reshape(batch, heads, length, width).transpose(0, 2, 1, 3)


@lru_cache(maxsize=64)
def _kernel(
    length: int, queries_per_key: int, window: int | None, interpret: bool, fused_backward: bool
) -> Any:
    """The kernel of one key head: its queries share keys, which are read once."""
    block = math.gcd(length, LARGEST_BLOCK)
    if window is None:
        mask: Any = splash.CausalMask((length, length))
    else:
        mask = splash.LocalMask((length, length), window_size=(window - 1, 0), offset=0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=None if fused_backward else block,
        block_kv_dq=None if fused_backward else block,
        use_fused_bwd_kernel=fused_backward,
    )
    masks = splash.MultiHeadMask([mask] * queries_per_key)
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mqa_single_device(
            masks,
            block_sizes=sizes,
            interpret=interpret,
            residual_checkpoint_name=KEPT_NAME,
        )


splash_attention = KernelAttention(_attend, _refuse)
# Scores are computed twice in the backward pass, for queries and for keys, as recipes without
# `sa_use_fused_bwd_kernel` do; nothing is added up outside VMEM then.
splash_attention_in_two = KernelAttention(partial(_attend, fused_backward=False), _refuse)
