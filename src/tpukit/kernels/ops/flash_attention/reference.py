"""Attention in plain jnp, the whole score matrix at once: what every kernel is judged by."""

import jax
import jax.numpy as jnp

from ..rope.reference import rope as rotate
from ..rope.tables import RopeTables
from .blocks import make_problem
from .problem import SegmentIds
from .visibility import BlockMask


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: SegmentIds | None = None,
    rope: RopeTables | None = None,
    dense_mask: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: BlockMask | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Attention of q (B, S, H, D) over k (B, S, KV, D), v (B, S, KV, Dv), in float32 or wider.

    The result of a query that may attend to no key is zero. `dense_mask` broadcasts to
    (B, H, queries, keys). `sinks` (H,) are scores of one more key each, whose value is zero.
    """
    problem = make_problem(q, k, v, causal=causal, window=window, mask=mask, scale=scale)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries, keys, values = (x.astype(wide) for x in (q, k, v))
    if rope is not None:
        queries, keys = (rotate_heads(x, rope) for x in (queries, keys))
    keys, values = (jnp.repeat(x, problem.group, axis=2) for x in (keys, values))
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys, precision="highest") * problem.scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    visible = jnp.asarray(problem.visibility.token_mask())[None, None]
    if segment_ids is not None:
        visible = visible & (segment_ids.q[:, None, :, None] == segment_ids.kv[:, None, None, :])
    if dense_mask is not None:
        visible = visible & dense_mask
    scores = jnp.where(visible, scores, jnp.finfo(wide).min)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(wide)[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : keys.shape[1]]
    weights = jnp.where(visible.any(-1, keepdims=True), weights, 0)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, values, precision="highest")
    return out.astype(q.dtype)


def rotate_heads(x: jax.Array, rope: RopeTables, *, back: bool = False) -> jax.Array:
    """RoPE on x (B, S, H, D) by tables that may be longer than S, or its opposite."""
    cos, sin = (table[..., : x.shape[1], :] for table in rope)
    return rotate(x, cos, -sin if back else sin)
