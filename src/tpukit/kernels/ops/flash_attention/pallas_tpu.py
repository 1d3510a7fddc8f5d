"""Flash attention on TPU: both passes of the Pallas kernels, with blocks for the generation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ....annotations import PyTree
from ....hardware.target import current_target
from ...blocks.tuned import choose_blocks
from ...blocks.vmem import check_vmem, vmem_limit_bytes
from ...registry.op import KernelCase
from .backward import ArrayGradients, pull_back
from .blocks import (
    backward_bytes,
    bucket,
    case_of,
    default_blocks,
    forward_bytes,
    keys_at_a_time,
    problem_of,
)
from .forward import attend
from .problem import LANES, AttentionArrays, FlashBlocks, Gradients, Problem, Residuals
from .reference import rotate_heads, sink_gradient
from .spec import BlockMask, SegmentIds
from .visibility import Visibility

# Name of the result and its log-sum-exp in a remat policy: kept, they save a second forward pass.
KEPT_NAME = "attention"
# Shorter sequences and narrower heads are mostly padding to the kernel's 128 x 128.
SHORTEST = 128
NARROWEST = 64


def can_flash(q: jax.Array, v: jax.Array, *, length: int | None = None) -> bool:
    """Whether the kernel suits such arrays, or shards of that length."""
    large = (length or q.shape[1]) >= SHORTEST and q.shape[-1] >= NARROWEST
    return large and q.dtype in (jnp.float32, jnp.bfloat16)


def result(*arrays: PyTree, **options: Any) -> jax.Array:
    """Return the result alone, without residuals."""
    return _attend(AttentionArrays(*arrays), with_lse=False, **options)[0]


def with_sums(*arrays: PyTree, **options: Any) -> tuple[jax.Array, jax.Array]:
    """Return the result and the log-sum-exp of each row (B, H, S), which joins results."""
    out, lse = _attend(AttentionArrays(*arrays), with_lse=True, **options)
    assert lse is not None
    return out, lse


def forward(*arrays: PyTree, **options: Any) -> tuple[jax.Array, Residuals]:
    """Return the result and the residuals."""
    out, lse = with_sums(*arrays, **options)
    return out, Residuals(*AttentionArrays(*arrays), out, lse)


def backward(
    residuals: Residuals,
    cotangent: jax.Array,
    *,
    blocks: FlashBlocks | None = None,
    interpret: Any = False,
    **options: Any,
) -> Gradients:
    """Return the gradients of q, k, v and the sinks."""
    q, k, v, segment_ids, rope, dense_mask, sinks, out, lse = residuals
    case = case_of(q, k, v, rope, dense_mask, options)
    chosen, problem = _blocks_for(case, blocks), problem_of(case)
    if rope is not None:
        q, k = (rotate_heads(x, rope) for x in (q, k))
    dq, dk, dv = _pull_back_in_parts(
        (q, k, v, out, lse, cotangent), segment_ids, dense_mask, problem, chosen, interpret
    )
    if rope is not None:
        dq, dk = (rotate_heads(x, rope, back=True) for x in (dq, dk))
    dsinks = None
    if sinks is not None:
        dots = jnp.sum(out.astype(jnp.float32) * cotangent.astype(jnp.float32), axis=-1)
        dsinks = sink_gradient(sinks, lse, dots)
    return dq, dk, dv, None, None, None, dsinks


def _attend(
    arrays: AttentionArrays,
    *,
    with_lse: bool,
    blocks: FlashBlocks | None = None,
    interpret: Any = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array | None]:
    case = case_of(*arrays[:3], arrays.rope, arrays.dense_mask, options)
    chosen, problem = _blocks_for(case, blocks), problem_of(case)
    used = forward_bytes(problem, chosen, rope=arrays.rope is not None)
    return attend(
        arrays,
        problem=problem,
        blocks=chosen,
        vmem_limit_bytes=vmem_limit_bytes(used, current_target()),
        interpret=interpret,
        with_lse=with_lse,
    )


def _blocks_for(case: KernelCase, blocks: FlashBlocks | None) -> FlashBlocks:
    from .api import OP  # the op names these functions, so it is imported late

    chosen = blocks or choose_blocks(OP.name, case, default_blocks, bucket=bucket)
    check_vmem(OP, case, chosen, current_target())
    return chosen.cut_to(problem_of(case).visibility)


def _pull_back_in_parts(
    arrays: tuple[jax.Array, ...],
    segment_ids: SegmentIds | None,
    dense_mask: jax.Array | None,
    problem: Problem,
    blocks: FlashBlocks,
    interpret: Any,
) -> ArrayGradients:
    """Run the backward kernel on as many keys at a time as it can sum gradients for in VMEM."""
    q, k, v, out, lse, cotangent = arrays
    chip, visibility = current_target(), problem.visibility
    part = keys_at_a_time(problem, blocks, chip)
    if visibility.mask is not None:
        part = max(part // visibility.mask.block_size, 1) * visibility.mask.block_size
    used = backward_bytes(problem, blocks, keys=part)
    limit = vmem_limit_bytes(used, chip)
    dq: jax.Array | None = None
    of_keys: list[tuple[jax.Array, jax.Array]] = []
    for start in range(0, visibility.kv_len, part):
        stop = min(start + part, visibility.kv_len)
        rows = _rows_attending(visibility, start, stop)
        ids = segment_ids
        if ids is not None:
            ids = SegmentIds(ids.q[:, rows], ids.kv[:, start:stop])
        mask = dense_mask
        if mask is not None:
            mask = mask[:, :, rows if problem.mask_rows > 1 else slice(None), start:stop]
        if rows.start == rows.stop:
            of_keys.append((jnp.zeros_like(k[:, start:stop]), jnp.zeros_like(v[:, start:stop])))
            continue
        local = dataclasses.replace(problem, visibility=_local(visibility, rows, start, stop))
        part_dq, dk, dv = pull_back(
            q[:, rows],
            k[:, start:stop],
            v[:, start:stop],
            out[:, rows],
            lse[:, :, rows],
            cotangent[:, rows],
            ids,
            mask,
            problem=local,
            blocks=blocks.cut_to(local.visibility),
            vmem_limit_bytes=limit,
            interpret=interpret,
        )
        of_keys.append((dk, dv))
        if rows == slice(0, visibility.q_len) and stop == visibility.kv_len and start == 0:
            dq = part_dq
        else:
            dq = jnp.zeros(q.shape, jnp.float32) if dq is None else dq
            dq = dq.at[:, rows].add(part_dq.astype(jnp.float32))
    assert dq is not None
    dk, dv = (jnp.concatenate(parts, axis=1) for parts in zip(*of_keys, strict=True))
    return dq.astype(q.dtype), dk, dv


def _rows_attending(visibility: Visibility, start: int, stop: int) -> slice:
    """Return the queries that attend to any of these keys, from the start of a block on.

    With a causal mask they begin at the first key, so that positions count from 0 again.
    """
    first = min(start, visibility.q_len) if visibility.causal else 0
    if visibility.symmetric:
        assert visibility.window is not None
        size = LANES if visibility.mask is None else visibility.mask.block_size
        first = min(max(start - visibility.window + 1, 0), visibility.q_len) // size * size
    end = (
        visibility.q_len
        if visibility.window is None
        else min(visibility.q_len, stop + visibility.window - 1)
    )
    return slice(first, max(first, end))


def _local(visibility: Visibility, rows: slice, start: int, stop: int) -> Visibility:
    mask = visibility.mask
    if mask is not None:
        size = mask.block_size
        cut = mask.to_array()[rows.start // size :, start // size : -(-stop // size)]
        mask = BlockMask.from_array(cut, block_size=size)
    offset = start - rows.start if visibility.symmetric else 0
    lengths = {"q_len": rows.stop - rows.start, "kv_len": stop - start}
    spec = dataclasses.replace(visibility.spec, mask=mask)
    return dataclasses.replace(visibility, spec=spec, key_offset=offset, **lengths)
