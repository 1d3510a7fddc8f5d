"""Flash attention in XLA: blocks of rows of the score matrix, in both passes."""

from typing import Any

import jax
import jax.numpy as jnp

from ....hardware.target import current_target
from .blocks import make_problem
from .problem import AttentionArrays, Gradients, Problem, Residuals, SegmentIds, pad_tokens
from .reference import rotate_heads, sink_gradient
from .visibility import ceil_div

# Above the first length the full score matrix is larger than the arrays; then ROWS rows at a time.
LONGEST_AT_ONCE = 1024
ROWS = 512


def forward(*arrays: Any, **options: Any) -> tuple[jax.Array, Residuals]:
    """Return the result, and the same residuals as the kernel's."""
    q, k, v, segment_ids, rope, dense_mask, sinks = AttentionArrays(*arrays)
    q, k, v = _fusion_barrier(q, k, v)
    problem = make_problem(q, k, v, **options)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries, keys = (q, k) if rope is None else (rotate_heads(x, rope) for x in (q, k))
    sink = None
    if sinks is not None:
        sink = sinks.astype(wide).reshape(problem.kv_heads, problem.group, 1, 1)

    def rows(row: jax.Array, part: jax.Array, ids: Any) -> tuple[jax.Array, jax.Array]:
        scores, visible, _ = _scores(part, keys, row, ids, segment_ids, mask, problem)
        highest = jnp.max(jnp.where(visible, scores, -jnp.inf), axis=-1, keepdims=True)
        if sink is not None:
            highest = jnp.maximum(highest, sink)
        highest = jnp.where(jnp.isfinite(highest), highest, 0)
        weights = jnp.where(visible, jnp.exp(scores - highest), 0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if sink is not None:
            total = total + jnp.exp(sink - highest)
        weights = (weights / jnp.where(total > 0, total, 1)).astype(v.dtype)
        out = jnp.einsum("bcgqk,bkcd->bqcgd", weights, v, preferred_element_type=wide)
        lse = (highest + jnp.log(jnp.where(total > 0, total, 1)))[..., 0]
        return out.reshape(*part.shape[:3], -1).astype(q.dtype), lse

    count = _row_count(q.shape[1])
    mask = _pad_mask(dense_mask, count)
    parts = _split(queries, count), _split_ids(segment_ids, count)
    out, lse = jax.lax.map(lambda x: rows(*x), (_starts(q, count), *parts))
    out = _join(out, q.shape[1])
    batch, heads = q.shape[0], q.shape[2]
    # (blocks, B, KV, group, rows) -> (B, H, S)
    lse = jnp.moveaxis(lse, 0, 3).reshape(batch, heads, -1)[..., : q.shape[1]]
    return out, Residuals(q, k, v, segment_ids, rope, dense_mask, sinks, out, lse.astype(wide))


def backward(residuals: Residuals, cotangent: jax.Array, **options: Any) -> Gradients:
    """Return the gradients of q, k, v and the sinks, from weights recomputed block by block."""
    q, k, v, segment_ids, rope, dense_mask, sinks, out, lse = residuals
    q, k, v, cotangent = _fusion_barrier(q, k, v, cotangent)
    problem = make_problem(q, k, v, **options)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries, keys = (q, k) if rope is None else (rotate_heads(x, rope) for x in (q, k))
    batch, length = q.shape[:2]
    group, count = problem.group, _row_count(length)
    mask = _pad_mask(dense_mask, count)
    dots = jnp.sum(out.astype(wide) * cotangent.astype(wide), axis=-1)

    def rows(sums: Any, x: Any) -> tuple[Any, jax.Array]:
        row, part, pulls, part_lse, part_dots, ids = x
        scores, visible, slope = _scores(part, keys, row, ids, segment_ids, mask, problem)
        by_group = (batch, count, problem.kv_heads, group)
        pulls = pulls.reshape(*by_group, -1)
        weights = jnp.exp(scores - _to_scores(part_lse, by_group))
        weights = jnp.where(visible, weights, 0)
        dweights = jnp.einsum("bqcgd,bkcd->bcgqk", pulls, v, preferred_element_type=wide)
        dscores = weights * (dweights - _to_scores(part_dots, by_group)) * problem.scale
        dscores = (dscores if slope is None else dscores * slope).astype(k.dtype)
        part_q = part.reshape(*by_group, -1)
        dk = jnp.einsum("bcgqk,bqcgd->bkcd", dscores, part_q, preferred_element_type=wide)
        dv = jnp.einsum(
            "bcgqk,bqcgd->bkcd", weights.astype(v.dtype), pulls, preferred_element_type=wide
        )
        dq = jnp.einsum("bcgqk,bkcd->bqcgd", dscores, keys, preferred_element_type=wide)
        return (sums[0] + dk, sums[1] + dv), dq.reshape(part.shape)

    zeros = jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)
    rows_first = jnp.moveaxis(lse, 1, 2)
    parts = [_split(x, count) for x in (queries, cotangent, rows_first, dots)]
    (dk, dv), dq = jax.lax.scan(
        rows, zeros, (_starts(q, count), *parts, _split_ids(segment_ids, count))
    )
    dq, dk = _join(dq, length).astype(q.dtype), dk.astype(k.dtype)
    if rope is not None:
        dq, dk = (rotate_heads(x, rope, back=True) for x in (dq, dk))
    dsinks = None if sinks is None else sink_gradient(sinks, lse, dots)
    return dq, dk, dv.astype(v.dtype), None, None, None, dsinks


def _fusion_barrier(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Keep XLA for CPUs from fusing a transposition into the matmuls below.

    It would fuse that of heads and sequence into a narrow matmul, for which it has no code
    ("Unsupported element type for DotThunk").
    """
    if current_target() is None and jax.default_backend() == "cpu":
        return jax.lax.optimization_barrier(arrays)
    return arrays


def _scores(
    q: jax.Array,
    k: jax.Array,
    row: jax.Array,
    q_ids: jax.Array | None,
    segment_ids: SegmentIds | None,
    mask: jax.Array | None,
    problem: Problem,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return scores (B, KV, group, rows, keys), which of them count, and the slope of the cap."""
    visibility = problem.visibility
    wide = jnp.promote_types(q.dtype, jnp.float32)
    batch, count, _, width = q.shape
    grouped = q.reshape(batch, count, problem.kv_heads, problem.group, width)
    scores = jnp.einsum("bqcgd,bkcd->bcgqk", grouped, k, preferred_element_type=wide)
    scores, slope = scores * problem.scale, None
    if problem.soft_cap is not None:
        bent = jnp.tanh(scores / problem.soft_cap)
        scores, slope = problem.soft_cap * bent, 1 - bent * bent
    rows, columns = row + jnp.arange(count)[:, None], jnp.arange(visibility.kv_len)[None, :]
    visible = jnp.ones((count, visibility.kv_len), bool)
    if visibility.causal:
        visible = visible & (columns <= rows)
    if visibility.window is not None:
        visible = visible & (rows - columns < visibility.window)
        if visibility.symmetric:
            visible = visible & (columns - rows < visibility.window)
    if visibility.mask is not None:
        size = visibility.mask.block_size
        blocks = jnp.asarray(visibility.mask.to_array())
        visible = visible & blocks[rows // size, columns // size]
    visible = visible[None, None, None]
    if segment_ids is not None and q_ids is not None:
        same = q_ids[:, :, None] == segment_ids.kv[:, None, :]
        visible = visible & same[:, None, None]
    if mask is not None:
        visible = visible & _mask_rows(mask, row, count, problem)
    return scores, visible, slope


def _to_scores(x: jax.Array, by_group: tuple[int, ...]) -> jax.Array:
    """Reshape (B, rows, H) to (B, KV, group, rows, 1)."""
    return jnp.moveaxis(x.reshape(by_group), 1, 3)[..., None]


def _pad_mask(mask: jax.Array | None, count: int) -> jax.Array | None:
    """Append rows of False after the last query, so that the last `count` rows can be sliced."""
    if mask is None or mask.shape[2] == 1:
        return mask
    return pad_tokens(mask, ceil_div(mask.shape[2], count) * count, axis=2)


def _mask_rows(mask: jax.Array, row: jax.Array, count: int, problem: Problem) -> jax.Array:
    """Return the mask (B or 1, H or 1, queries or 1, keys) of some queries, shaped as scores."""
    if mask.shape[2] > 1:
        mask = jax.lax.dynamic_slice_in_dim(mask, row, count, axis=2)
    heads = (1, 1) if mask.shape[1] == 1 else (problem.kv_heads, problem.group)
    return mask.reshape(mask.shape[0], *heads, *mask.shape[2:])


def _row_count(length: int) -> int:
    return length if length <= LONGEST_AT_ONCE else ROWS


def _starts(q: jax.Array, count: int) -> jax.Array:
    return jnp.arange(ceil_div(q.shape[1], count)) * count


def _split(x: jax.Array, count: int) -> jax.Array:
    """Reshape (B, S, ...) to (blocks, B, count, ...), padded with zeros."""
    blocks = ceil_div(x.shape[1], count)
    padded = pad_tokens(x, blocks * count, axis=1)
    return jnp.moveaxis(padded.reshape(x.shape[0], blocks, count, *x.shape[2:]), 1, 0)


def _split_ids(segment_ids: SegmentIds | None, count: int) -> jax.Array | None:
    return None if segment_ids is None else _split(segment_ids.q, count)


def _join(x: jax.Array, length: int) -> jax.Array:
    """Undo `_split`."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length]
