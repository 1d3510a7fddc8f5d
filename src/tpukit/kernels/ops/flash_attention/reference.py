"""Attention in plain jnp, and the parts that implementations share: RoPE and sinks."""

from typing import Any

import jax
import jax.numpy as jnp

from ....annotations import PyTree
from ..rope import RopeTables
from ..rope import rotate as rotate
from .problem import AttentionArrays
from .spec import AttentionSpec
from .visibility import Visibility


def attention(*arrays: PyTree, **options: Any) -> jax.Array:
    """Return attention of q (B, S, H, D) over k (B, S, KV, D) and v (B, S, KV, Dv).

    It is computed from all scores at once, in float32 or wider. The result of a query that attends
    to no key is zero.

    Args:
        *arrays: The fields of `AttentionArrays`.
        **options: The static fields of `AttentionSpec`.
    """
    q, k, v, segment_ids, rope, dense_mask, sinks = AttentionArrays(*arrays)
    spec = AttentionSpec(**options)
    group = q.shape[2] // k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries, keys, values = (x.astype(wide) for x in (q, k, v))
    if rope is not None:
        queries, keys = (rotate_heads(x, rope) for x in (queries, keys))
    keys, values = (jnp.repeat(x, group, axis=2) for x in (keys, values))
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys, precision="highest")
    scores, _ = spec.cap(scores * spec.scale_of(q.shape[3]))
    visible = jnp.asarray(Visibility(q.shape[1], k.shape[1], spec).token_mask())[None, None]
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
    """Rotate x (B, S, H, D) by RoPE tables that may be longer than S, or back."""
    cos, sin = (table[..., : x.shape[1], :] for table in rope)
    return rotate(x, cos, -sin if back else sin)


def add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Add sinks (H,) to a result (B, S, H, Dv) with log-sum-exp (B, H, S).

    A sink is one more key with a value of zero: it only joins the sum of the weights. So it can be
    added to a result with a known log-sum-exp, and its gradient needs no scores.
    """
    with_sinks = jnp.logaddexp(lse, sinks.astype(lse.dtype)[:, None])
    share = jnp.moveaxis(jnp.exp(lse - with_sinks), 1, 2)[..., None]
    return (out * share).astype(out.dtype), with_sinks


def sink_gradient(sinks: jax.Array, lse: jax.Array, dots: jax.Array) -> jax.Array:
    """Return the gradient of sinks (H,).

    Args:
        sinks: Scores of the sinks.
        lse: (B, H, S) log-sum-exp of each row, with the sink.
        dots: (B, S, H) the dot product of each row of the result with its cotangent.
    """
    weights = jnp.exp(sinks.astype(lse.dtype)[:, None] - lse)
    return -jnp.einsum("bhs,bsh->h", weights, dots.astype(lse.dtype)).astype(sinks.dtype)
