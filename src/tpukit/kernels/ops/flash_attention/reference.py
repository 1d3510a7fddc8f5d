"""Attention in plain jnp, and the parts that implementations share: RoPE, sinks and chunks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..rope import RopeTables
from ..rope import rotate as rotate
from .blocks import make_problem
from .problem import AttentionArrays
from .visibility import BlockMask


def attention(
    *arrays: Any,
    causal: bool = False,
    window: int | None = None,
    mask: BlockMask | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Return attention of q (B, S, H, D) over k (B, S, KV, D) and v (B, S, KV, Dv).

    It is computed from all scores at once, in float32 or wider. The result of a query that attends
    to no key is zero.

    Args:
        *arrays: The fields of `AttentionArrays`.
        causal: Whether query i attends only to keys j <= i.
        window: Query i attends only to keys j with |i - j| < window.
        mask: Blocks of scores to compute.
        soft_cap: Squeeze scores into ±soft_cap by a tanh.
        scale: Factor of the scores; `D ** -0.5` by default.
    """
    q, k, v, segment_ids, rope, dense_mask, sinks = AttentionArrays(*arrays)
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


def attend_in_chunks(
    attend: Callable[..., jax.Array], *arrays: jax.Array | None, chunk: int | None
) -> jax.Array:
    """Compute causal attention within chunks of tokens.

    Chunks are independent, so they become examples of their own: causal attention over shorter
    sequences, in every implementation, that neither computes nor reads anything else.

    Args:
        attend: Causal attention of the arrays.
        *arrays: Queries, and other arrays with tokens as second axis, (B, S, ...); or None.
        chunk: Tokens of a chunk; the last chunk may have fewer.
    """
    queries = arrays[0]
    assert queries is not None
    batch, length = queries.shape[:2]
    if chunk is None or chunk >= length:
        return attend(*arrays)
    in_chunks = length // chunk * chunk

    def by_chunk(x: jax.Array) -> jax.Array:
        return x[:, :in_chunks].reshape(-1, chunk, *x.shape[2:])

    out = attend(*(None if x is None else by_chunk(x) for x in arrays))
    out = out.reshape(batch, in_chunks, *out.shape[2:])
    if in_chunks == length:
        return out
    rest = attend(*(None if x is None else x[:, in_chunks:] for x in arrays))
    return jnp.concatenate([out, rest], axis=1)
