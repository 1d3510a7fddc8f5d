"""Attention on TPU through tpukit's own kernel."""

import jax
import jax.numpy as jnp

from ...errors import TPUModelError
from ...kernels.ops.flash_attention.differentiation import implementation
from ...kernels.ops.flash_attention.pallas_tpu import NARROWEST, SHORTEST, can_flash
from ...kernels.ops.flash_attention.problem import SegmentIds
from ...kernels.registry.op import PALLAS_TPU
from .on_mesh import KernelAttention


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
