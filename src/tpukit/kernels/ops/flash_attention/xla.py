"""Flash attention in XLA: blocks of rows of the score matrix, in both passes."""

from typing import Any

import jax
import jax.numpy as jnp

from ....annotations import PyTree
from ....hardware.target import current_target
from .blockwise import (
    KeyBlocks,
    OutputGradient,
    Queries,
    Softmax,
    add_block,
    block_gradients,
    from_blocks,
    to_blocks,
)
from .problem import AttentionArrays, Gradients, Residuals, pad_tokens
from .reference import add_sinks, rotate_heads, sink_gradient
from .spec import AttentionSpec
from .visibility import ceil_div

# Above the first length the full score matrix is larger than the arrays; then ROWS rows at a time.
LONGEST_AT_ONCE = 1024
ROWS = 512


def forward(*arrays: PyTree, **options: Any) -> tuple[jax.Array, Residuals]:
    """Return the result, and the same residuals as the kernel's."""
    given, spec = AttentionArrays(*arrays), AttentionSpec(**options)
    q, k, v = _fusion_barrier(given.q, given.k, given.v)
    queries, keys, mask = _split(given._replace(q=q, k=k, v=v))

    def rows(queries: Queries) -> tuple[jax.Array, jax.Array]:
        queries = _with_mask(queries, mask)
        softmax = add_block(spec, Softmax.empty(queries.q, v.shape[-1]), queries, keys)
        return softmax.output.astype(q.dtype), softmax.log_normalizer

    out, lse = jax.lax.map(rows, queries)
    batch, length, heads = q.shape[:3]
    out = from_blocks(out)[:, :length].reshape(batch, length, heads, -1)
    # (blocks, B, KV, group, rows) -> (B, H, S)
    lse = jnp.moveaxis(lse, 0, 3).reshape(batch, heads, -1)[..., :length]
    if given.sinks is not None:
        out, lse = add_sinks(out, lse, given.sinks)
    return out, Residuals(*given._replace(q=q, k=k, v=v), out, lse)


def backward(residuals: Residuals, cotangent: jax.Array, **options: Any) -> Gradients:
    """Return the gradients of q, k, v and the sinks, from weights recomputed block by block."""
    given, out, lse = residuals.arrays, residuals.out, residuals.lse
    spec = AttentionSpec(**options)
    q, k, v, cotangent = _fusion_barrier(given.q, given.k, given.v, cotangent)
    queries, keys, mask = _split(given._replace(q=q, k=k, v=v))
    precise, length = lse.dtype, q.shape[1]
    dots = jnp.sum(out.astype(precise) * cotangent.astype(precise), axis=-1)

    def by_block(x: jax.Array) -> jax.Array:
        """Reshape (B, S, H, ...) to (blocks, B, rows, KV, group, ...)."""
        return _to_padded_blocks(x, length).reshape(*queries.q.shape[:-1], *x.shape[3:])

    gradient = OutputGradient(
        by_block(cotangent),
        jnp.moveaxis(by_block(dots), 2, -1),
        jnp.moveaxis(by_block(jnp.moveaxis(lse, 1, 2)), 2, -1),
    )

    def rows(
        sums: tuple[jax.Array, jax.Array], block: tuple[Queries, OutputGradient]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        queries, gradient = block
        dq, dk, dv = block_gradients(spec, _with_mask(queries, mask), keys, gradient)
        return (sums[0] + dk, sums[1] + dv), dq

    zeros = jnp.zeros(k.shape, precise), jnp.zeros(v.shape, precise)
    (dk, dv), dq = jax.lax.scan(rows, zeros, (queries, gradient))
    dq = from_blocks(dq)[:, :length].reshape(q.shape).astype(q.dtype)
    dk = dk.astype(k.dtype)
    if given.rope is not None:
        dq, dk = (rotate_heads(x, given.rope, back=True) for x in (dq, dk))
    dsinks = None if given.sinks is None else sink_gradient(given.sinks, lse, dots)
    return dq, dk, dv.astype(v.dtype), None, None, None, dsinks


def _fusion_barrier(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Keep XLA for CPUs from fusing a transposition into the matmuls below.

    It would fuse that of heads and sequence into a narrow matmul, for which it has no code
    ("Unsupported element type for DotThunk").
    """
    if current_target() is None and jax.default_backend() == "cpu":
        return jax.lax.optimization_barrier(arrays)
    return arrays


def _split(arrays: AttentionArrays) -> tuple[Queries, KeyBlocks, jax.Array | None]:
    """Return rotated queries in blocks of rows, all keys as one block, and the padded mask."""
    q, k, v, segment_ids, rope, dense_mask, _ = arrays
    length, heads = q.shape[1], k.shape[2]
    if rope is not None:
        q, k = (rotate_heads(x, rope) for x in (q, k))
    blocks = _to_padded_blocks(q, length)
    count, rows = blocks.shape[0], blocks.shape[2]
    queries = Queries(
        blocks.reshape(*blocks.shape[:3], heads, -1, q.shape[-1]),
        jnp.arange(count * rows).reshape(count, rows),
        None if segment_ids is None else _to_padded_blocks(segment_ids.q, length),
    )
    ids = None if segment_ids is None else segment_ids.kv
    if dense_mask is not None and dense_mask.shape[2] > 1:
        dense_mask = pad_tokens(dense_mask, count * rows, axis=2)
    return queries, KeyBlocks(k, v, jnp.arange(k.shape[1]), ids), dense_mask


def _with_mask(queries: Queries, mask: jax.Array | None) -> Queries:
    """Return one block of queries with its rows of a mask (B or 1, H or 1, queries or 1, keys)."""
    if mask is None:
        return queries
    _, rows, kv_heads, group, _ = queries.q.shape
    if mask.shape[2] > 1:
        mask = jax.lax.dynamic_slice_in_dim(mask, queries.positions[0], rows, axis=2)
    heads = (1, 1) if mask.shape[1] == 1 else (kv_heads, group)
    return queries._replace(mask=mask.reshape(mask.shape[0], *heads, *mask.shape[2:]))


def _to_padded_blocks(x: jax.Array, length: int) -> jax.Array:
    """Reshape (B, S, ...) to (blocks, B, rows, ...), padded with zeros."""
    rows = length if length <= LONGEST_AT_ONCE else ROWS
    return to_blocks(pad_tokens(x, ceil_div(length, rows) * rows, axis=1), rows)
