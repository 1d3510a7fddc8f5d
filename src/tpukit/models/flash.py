"""Attention on TPU through tpukit's own kernel."""

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import TPUModelError
from ..kernels.flash_attention.differentiation import implementation
from ..kernels.flash_attention.problem import SegmentIds
from ..kernels.op import PALLAS_TPU
from ..parallel.mesh import AnyMesh
from .attention_on_mesh import attend_on_mesh

# Shorter sequences and narrower heads are mostly padding to the kernel's 128 x 128.
SHORTEST = 128
NARROWEST = 64


def can_flash(q: jax.Array) -> bool:
    """Whether the kernel is made for queries of this shape and dtype."""
    large = q.shape[1] >= SHORTEST and q.shape[-1] >= NARROWEST
    return large and q.dtype in (jnp.float32, jnp.bfloat16)


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    mesh: AnyMesh | None = None,
    batch_axes: tuple[str, ...] = (),
    head_axes: tuple[str, ...] = (),
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of q (B, S, H, D) over k, v (B, S, KV, D), by `kernels.flash_attention`.

    Args:
        q: Queries.
        k: Keys; H must be a multiple of KV.
        v: Values.
        window: How many keys back a query sees, itself included.
        segment_ids: (B, S) numbers that keep packed documents apart.
        mesh: The mesh the arrays are spread over: a kernel sees only its own device's part.
        batch_axes: Mesh axes that split the batch.
        head_axes: Mesh axes that split the heads.
        interpret: Run the kernel's meaning without a TPU, slowly.

    Raises:
        TPUModelError: Sequences or heads are too small for it, or the dtype is another.
    """
    if not can_flash(q):
        raise TPUModelError(
            f"flash attention takes float32 or bfloat16, {SHORTEST} tokens or more and heads of "
            f"{NARROWEST} or more, and the queries are {q.dtype.name} {q.shape}; change them, or "
            "use attention='xla'."
        )
    kernel = implementation(PALLAS_TPU)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        ids = None if segment_ids is None else segment_ids.astype(jnp.int32)
        pair = None if ids is None else SegmentIds(ids, ids)
        options: dict[str, Any] = {"causal": True, "window": window, "interpret": interpret}
        return kernel(q, k, v, pair, **options)

    return attend_on_mesh(
        local, q, k, v, segment_ids, mesh=mesh, batch_axes=batch_axes, head_axes=head_axes
    )
