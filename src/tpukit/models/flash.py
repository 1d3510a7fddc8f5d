"""Attention on TPU through tpukit's own kernel."""

import jax
import jax.numpy as jnp

from ..errors import TPUModelError
from ..kernels.flash_attention.differentiation import implementation
from ..kernels.flash_attention.problem import SegmentIds
from ..kernels.op import PALLAS_TPU
from .attention_on_mesh import KernelAttention

# Shorter sequences and narrower heads are mostly padding to the kernel's 128 x 128.
SHORTEST = 128
NARROWEST = 64


def can_flash(q: jax.Array) -> bool:
    """Whether the kernel is made for queries of this shape and dtype."""
    large = q.shape[1] >= SHORTEST and q.shape[-1] >= NARROWEST
    return large and q.dtype in (jnp.float32, jnp.bfloat16)


def _refuse(q: jax.Array) -> None:
    if not can_flash(q):
        raise TPUModelError(
            f"flash attention takes float32 or bfloat16, {SHORTEST} tokens or more and heads of "
            f"{NARROWEST} or more, and the queries are {q.dtype.name} {q.shape}; change them, or "
            "use attention='xla'."
        )


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    *,
    window: int | None,
    interpret: bool,
) -> jax.Array:
    ids = None if segment_ids is None else segment_ids.astype(jnp.int32)
    pair = None if ids is None else SegmentIds(ids, ids)
    kernel = implementation(PALLAS_TPU)
    return kernel(q, k, v, pair, causal=True, window=window, interpret=interpret)


flash_attention = KernelAttention(_attend, _refuse)
