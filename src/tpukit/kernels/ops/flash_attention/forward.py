"""The forward kernel: blocks of scores stay in VMEM; returns the log-sum-exp of each row."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...blocks.tiling import Interpret, round_up
from .problem import (
    LANES,
    LOG2_E,
    LOWEST_MAXIMUM,
    SMALLEST_SUM,
    AttentionArrays,
    FlashBlocks,
    Problem,
    from_rows,
    matmul,
    pad_tokens,
    to_rows,
)
from .scores import (
    cap,
    hide,
    lane_tables,
    rotate,
    rows_attending,
    sparse_table,
    stream_mask,
    visit_listed,
    visit_visible,
    when,
)
from .visibility import Position, maximum, minimum


def attend(
    arrays: AttentionArrays,
    *,
    problem: Problem,
    blocks: FlashBlocks,
    vmem_limit_bytes: int | None,
    interpret: Interpret,
    with_lse: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the result (B, S, H, Dv), and `with_lse` the log-sum-exp of each row (B, H, S)."""
    q, k, v, segment_ids, rope, dense_mask, sinks = arrays
    visibility, width, v_width = problem.visibility, problem.padded_width, problem.padded_v_width
    batch, group, rows, held = q.shape[0], problem.group, blocks.block_q, blocks.block_kv
    q_tokens, kv_tokens = round_up(visibility.q_len, rows), round_up(visibility.kv_len, held)
    q_steps, kv_steps = q_tokens // rows, kv_tokens // held
    if visibility.mask is None:
        spans = [visibility.keys_of(i * rows, rows, block=held) for i in range(q_steps)]
        kv_steps = max(1, *(span.end - span.first for span in spans))
        table = None
    else:
        per_step = held // blocks.block_kv_compute
        table = sparse_table(
            visibility, outer=q_steps, steps=kv_steps, inner_per_step=per_step, by_keys=False
        )

    def held_block(i: Position, step: Position) -> Position:
        if visibility.mask is not None:
            return step
        span = visibility.keys_of(i * rows, rows, block=held)
        return maximum(0, minimum(span.first + step, span.end - 1))

    def of_queries(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, lanes), lambda b, h, g, i, s, *_: (b, i, h * group + g))

    def of_keys(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, held, lanes), lambda b, h, g, i, s, *_: (b, held_block(i, s), h))

    row_spec = pl.BlockSpec(
        (None, None, 1, rows), lambda b, h, g, i, s, *_: (b, h * group + g, 0, i)
    )
    arguments: list[Any] = [to_rows(q, tokens=q_tokens)]
    arguments += [to_rows(x, tokens=kv_tokens) for x in (k, v)]
    specs: list[Any] = [of_queries(width), of_keys(width), of_keys(v_width)]
    if rope is not None:
        shared = rope.cos.ndim == 2
        tables = (lane_tables(rope, q_tokens), lane_tables(rope, kv_tokens))
        arguments += tables
        by_query = pl.BlockSpec(
            (None, rows, width), lambda b, h, g, i, s, *_: (0 if shared else b, i, 0)
        )
        by_key = pl.BlockSpec(
            (None, held, width), lambda b, h, g, i, s, *_: (0 if shared else b, held_block(i, s), 0)
        )
        specs += [(by_query, by_query), (by_key, by_key)]
    else:
        arguments, specs = [*arguments, None, None], [*specs, None, None]
    if segment_ids is not None:
        arguments += [
            pad_tokens(segment_ids.q, q_tokens, axis=1)[:, None],
            pad_tokens(segment_ids.kv, kv_tokens, axis=1)[:, None],
        ]
        specs += [
            pl.BlockSpec((None, 1, rows), lambda b, h, g, i, s, *_: (b, 0, i)),
            pl.BlockSpec((None, 1, held), lambda b, h, g, i, s, *_: (b, 0, held_block(i, s))),
        ]
    else:
        arguments, specs = [*arguments, None, None], [*specs, None, None]
    mask, mask_spec = None, None
    if dense_mask is not None:
        mask, mask_spec = stream_mask(
            dense_mask,
            lambda b, h, g, i, s, *_: (b, h * group + g, i, held_block(i, s)),
            tokens=(q_tokens, kv_tokens),
            block=(rows, held),
        )
    arguments, specs = [*arguments, mask], [*specs, mask_spec]
    arguments.append(None if sinks is None else sinks.astype(jnp.float32) * LOG2_E)
    specs.append(None if sinks is None else pl.BlockSpec(memory_space=pltpu.SMEM))

    kernel = partial(
        _kernel,
        problem=problem,
        blocks=blocks,
        kv_steps=kv_steps,
        sparse=table is not None,
    )
    scratch = [
        pltpu.VMEM((rows, width), q.dtype),
        None if rope is None else pltpu.VMEM((held, width), q.dtype),
        None if segment_ids is None else pltpu.VMEM((rows, LANES), jnp.int32),
        pltpu.VMEM((rows, LANES), jnp.float32),
        pltpu.VMEM((rows, LANES), jnp.float32),
        pltpu.VMEM((rows, v_width), jnp.float32),
    ]
    call = pl.pallas_call(
        kernel,
        name="flash_attention_forward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0 if table is None else 1,
            grid=(batch, problem.kv_heads, group, q_steps, kv_steps),
            in_specs=specs,
            out_specs=[
                of_queries(v_width),
                row_spec if with_lse else None,
            ],
            scratch_shapes=scratch,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, q_tokens, problem.heads * v_width), q.dtype),
            jax.ShapeDtypeStruct((batch, problem.heads, 1, q_tokens), jnp.float32)
            if with_lse
            else None,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes,
        ),
        interpret=interpret,
    )
    prefetched = [] if table is None else [jnp.asarray(table)]
    # jax removes an unused jitted call, as in a backward pass with kept results, but not a bare
    # kernel.
    out, lse = jax.jit(call)(*prefetched, *arguments)
    out = from_rows(out, tokens=visibility.q_len, heads=problem.heads, width=problem.v_width)
    return out, lse[:, :, 0, : visibility.q_len] if with_lse else None


def _kernel(*refs: Any, problem: Problem, blocks: FlashBlocks, kv_steps: int, sparse: bool) -> None:
    table = refs[0] if sparse else None
    q, k, v, q_tables, k_tables, q_ids, kv_ids, mask, sinks, out, lse, *scratch = refs[
        int(sparse) :
    ]
    scaled, rotated, id_column, maxima, sums, total = scratch
    rows, compute = blocks.block_q, blocks.block_kv_compute
    i, step = pl.program_id(3), pl.program_id(4)
    row = i * rows

    @when(step == 0, always=kv_steps == 1)
    def _() -> None:
        wide = q[...].astype(jnp.float32)
        if q_tables is not None:
            wide = rotate(wide, q_tables[0][...], q_tables[1][...], width=problem.width)
        scaled[...] = (wide * problem.query_factor).astype(scaled.dtype)
        if sinks is None:
            maxima[...] = jnp.full_like(maxima, LOWEST_MAXIMUM)
            sums[...] = jnp.zeros_like(sums)
        else:
            # The sink is the first key: alone, its weight is 1. Its value is zero.
            maxima[...] = jnp.full_like(
                maxima, sinks[pl.program_id(1) * problem.group + pl.program_id(2)]
            )
            lane = jax.lax.broadcasted_iota(jnp.int32, sums.shape, 1)
            sums[...] = jnp.where(lane == 0, 1.0, 0.0)
        total[...] = jnp.zeros_like(total)
        if q_ids is not None:
            id_column[...] = jnp.broadcast_to(q_ids[...], (LANES, rows)).T

    if k_tables is not None:
        # Keys that stay in VMEM are rotated once for all queries of a head.
        @pl.when((i == 0) | (problem.visibility.kv_len > blocks.block_kv))
        def _() -> None:
            wide = k[...].astype(jnp.float32)
            wide = rotate(wide, k_tables[0][...], k_tables[1][...], width=problem.width)
            rotated[...] = wide.astype(rotated.dtype)

    keys = k if k_tables is None else rotated

    def update(
        block: Position, held_first: Position, *, edge: bool, offset: int | None = None
    ) -> None:
        """Add a block of keys, only for the queries that attend to it where those are known."""
        mine = (
            slice(0, rows)
            if offset is None
            else rows_attending(problem.visibility, offset, compute, rows)
        )
        local = (block - held_first) * compute
        local = local if isinstance(local, int) else pl.multiple_of(local, compute)
        inside = pl.ds(local, compute)
        scores = matmul(scaled[mine], keys[inside], contract=(1, 1), precision=problem.precision)
        scores, _ = cap(scores, problem)
        allowed: list[Any] = []
        if q_ids is not None:
            allowed.append(jnp.tile(id_column[mine], (1, compute // LANES)) == kv_ids[:, inside])
        if mask is not None:
            of_rows = mask[slice(None) if mask.shape[0] == 1 else mine, inside].astype(jnp.int32)
            allowed.append(jnp.broadcast_to(of_rows, scores.shape) != 0)
        scores = hide(
            scores,
            problem.visibility,
            row=row,
            column=block * compute,
            edge=edge,
            shift=None if offset is None else max(-offset, 0),
            allowed=allowed,
        )
        before = maxima[mine]
        after = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        shrink = jnp.exp2(before - after)
        maxima[mine] = after
        weights = jnp.exp2(scores - jnp.tile(after, (1, compute // LANES)))
        # Lanes are summed once at the end; here full registers are added.
        partial_sums = weights[:, :LANES]
        for start in range(LANES, compute, LANES):
            partial_sums = partial_sums + weights[:, start : start + LANES]
        sums[mine] = shrink * sums[mine] + partial_sums
        added = matmul(
            weights.astype(v.dtype), v[inside], contract=(1, 0), precision=problem.precision
        )
        total[mine] = jnp.tile(shrink, (1, total.shape[1] // LANES)) * total[mine] + added

    per_held = blocks.block_kv // compute
    if table is not None:
        held_first = step * per_held
        visit_listed(table, (i * kv_steps + step) * (2 + per_held), held_first, update)
    else:
        visit_visible(problem, blocks, row, step, per_held, update)

    @when(step == kv_steps - 1, always=kv_steps == 1)
    def _() -> None:
        # The total of a row that attends to no key is 0, and so is its sum.
        summed = jnp.maximum(jnp.sum(sums[...], axis=1, keepdims=True), SMALLEST_SUM)
        out[...] = (total[...] * (1.0 / summed)).astype(out.dtype)
        if lse is not None:
            # Transposed together, so that a query then takes one value instead of a register.
            lane = jax.lax.broadcasted_iota(jnp.int32, maxima.shape, 1)
            turned_rows = jnp.where(lane == 0, maxima[...], summed).T
            lse[...] = turned_rows[:1] * (1 / LOG2_E) + jnp.log(turned_rows[1:2])
