"""The backward kernel: every block of weights is recomputed once, for all three gradients.

Queries stay in VMEM while the kernel iterates over keys, and the gradients of all keys of one call
are summed in VMEM, so that nothing is read or written twice. Scores are (keys, queries) here, so
that a query's value is a row, which broadcasts over keys for free.
"""

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
    FlashBlocks,
    Problem,
    SegmentIds,
    from_rows,
    matmul,
    pad_tokens,
    to_rows,
)
from .scores import cap, hide, sparse_table, stream_mask, visit_listed, when
from .visibility import Position, maximum, minimum

ArrayGradients = tuple[jax.Array, jax.Array, jax.Array]


def pull_back(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    cotangent: jax.Array,
    segment_ids: SegmentIds | None,
    dense_mask: jax.Array | None,
    *,
    problem: Problem,
    blocks: FlashBlocks,
    vmem_limit_bytes: int | None,
    interpret: Interpret,
) -> ArrayGradients:
    """Return the gradients of q, k and v, given result and log-sum-exp (B, H, S) of `attend`."""
    visibility, group = problem.visibility, problem.group
    width, v_width = problem.padded_width, problem.padded_v_width
    batch, held, columns = q.shape[0], blocks.backward_q, blocks.backward_kv
    q_tokens, kv_tokens = round_up(visibility.q_len, held), round_up(visibility.kv_len, columns)
    q_steps, kv_steps = q_tokens // held, kv_tokens // columns
    table = None
    if visibility.mask is not None:
        per_step = held // blocks.backward_q_compute
        table = sparse_table(
            visibility, outer=kv_steps, steps=q_steps, inner_per_step=per_step, by_keys=True
        )

    def seen_block(i: Position, j: Position) -> Position:
        if visibility.mask is not None:
            return j
        span = visibility.keys_of(i * held, held, block=columns)
        return maximum(0, minimum(maximum(j, span.first), span.end - 1))

    def finished(g: Position, i: Position, j: Position) -> Position:
        """Return the block of key gradients that is written in the last round over the keys."""
        return jnp.where((g == group - 1) & (i == q_steps - 1), j, 0)

    def of_queries(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, held, lanes), lambda b, h, g, i, j, *_: (b, i, h * group + g))

    def of_keys(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, columns, lanes), lambda b, h, g, i, j, *_: (b, seen_block(i, j), h)
        )

    def of_key_gradients(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, columns, lanes), lambda b, h, g, i, j, *_: (b, finished(g, i, j), h)
        )

    row_spec = pl.BlockSpec(
        (None, None, 1, held), lambda b, h, g, i, j, *_: (b, h * group + g, 0, i)
    )
    arguments: list[Any] = [to_rows(x, tokens=q_tokens) for x in (q, out, cotangent)]
    arguments.append(pad_tokens(lse, q_tokens, axis=2)[:, :, None])
    arguments += [to_rows(x, tokens=kv_tokens) for x in (k, v)]
    specs: list[Any] = [*map(of_queries, (width, v_width, v_width)), row_spec]
    specs += map(of_keys, (width, v_width))
    if segment_ids is not None:
        arguments += [
            pad_tokens(segment_ids.q, q_tokens, axis=1)[:, None],
            pad_tokens(segment_ids.kv, kv_tokens, axis=1)[:, None],
        ]
        specs += [
            pl.BlockSpec((None, 1, held), lambda b, h, g, i, j, *_: (b, 0, i)),
            pl.BlockSpec((None, 1, columns), lambda b, h, g, i, j, *_: (b, 0, seen_block(i, j))),
        ]
    else:
        arguments, specs = [*arguments, None, None], [*specs, None, None]
    mask, mask_spec = None, None
    if dense_mask is not None:
        mask, mask_spec = stream_mask(
            # After the forward pass, because XLA would build the masks of both at once, and a third
            # copy.
            jax.lax.optimization_barrier((dense_mask, lse))[0],
            lambda b, h, g, i, j, *_: (b, h * group + g, i, seen_block(i, j)),
            tokens=(q_tokens, kv_tokens),
            block=(held, columns),
            by_keys=True,
        )
    arguments, specs = [*arguments, mask], [*specs, mask_spec]
    by_key = pltpu.VMEM((columns, LANES), jnp.int32)
    one_row = dense_mask is not None and dense_mask.shape[2] == 1
    call = pl.pallas_call(
        partial(
            _kernel,
            problem=problem,
            blocks=blocks,
            q_steps=q_steps,
            kv_steps=kv_steps,
            sparse=table is not None,
        ),
        name="flash_attention_backward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0 if table is None else 1,
            grid=(batch, problem.kv_heads, group, q_steps, kv_steps),
            in_specs=specs,
            out_specs=[of_queries(width), *map(of_key_gradients, (width, v_width))],
            scratch_shapes=[
                pltpu.VMEM((held, width), q.dtype),
                None if segment_ids is None else by_key,
                by_key if one_row else None,
                pltpu.VMEM((1, held), jnp.float32),
                pltpu.VMEM((held, width), jnp.float32),
                pltpu.VMEM((kv_tokens, width), jnp.float32),
                pltpu.VMEM((kv_tokens, v_width), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(arguments[0].shape, q.dtype),
            jax.ShapeDtypeStruct(arguments[4].shape, k.dtype),
            jax.ShapeDtypeStruct(arguments[5].shape, v.dtype),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes,
        ),
        interpret=interpret,
    )
    prefetched = [] if table is None else [jnp.asarray(table)]
    dq, dk, dv = call(*prefetched, *arguments)
    return (
        from_rows(dq, tokens=visibility.q_len, heads=problem.heads, width=problem.width),
        from_rows(dk, tokens=visibility.kv_len, heads=problem.kv_heads, width=problem.width),
        from_rows(dv, tokens=visibility.kv_len, heads=problem.kv_heads, width=problem.v_width),
    )


def _kernel(
    *refs: Any,
    problem: Problem,
    blocks: FlashBlocks,
    q_steps: int,
    kv_steps: int,
    sparse: bool,
) -> None:
    table = refs[0] if sparse else None
    q, out, cotangent, lse, k, v, q_ids, kv_ids, mask, dq, dk, dv, *scratch = refs[int(sparse) :]
    scaled, id_column, mask_column, dots, dq_sum, dk_sum, dv_sum = scratch
    compute, columns = blocks.backward_q_compute, blocks.backward_kv
    g, i, j = pl.program_id(2), pl.program_id(3), pl.program_id(4)
    column = j * columns
    all_columns = pl.ds(pl.multiple_of(column, columns), columns)

    @when(j == 0, always=kv_steps == 1)
    def _() -> None:
        scaled[...] = (q[...].astype(jnp.float32) * problem.query_factor).astype(scaled.dtype)
        products = out[...].astype(jnp.float32) * cotangent[...].astype(jnp.float32)
        dots[...] = jnp.sum(products.T, axis=0, keepdims=True)
        dq_sum[...] = jnp.zeros_like(dq_sum)

    @pl.when((g == 0) & (i == 0))
    def _() -> None:
        dk_sum[all_columns] = jnp.zeros((columns, dk_sum.shape[1]), jnp.float32)
        dv_sum[all_columns] = jnp.zeros((columns, dv_sum.shape[1]), jnp.float32)

    if kv_ids is not None:
        id_column[...] = jnp.broadcast_to(kv_ids[...], (LANES, columns)).T
    if mask_column is not None:
        mask_column[...] = jnp.broadcast_to(mask[...], (LANES, columns)).T

    def update(
        block: Position, held_first: Position, *, edge: bool, stair: int | None = None
    ) -> None:
        """Add a block of queries; on the diagonal, only to the keys up to its step."""
        attended = columns if stair is None else (stair + 1) * compute
        local: Any = (block - held_first) * compute
        mine = pl.ds(pl.multiple_of(local, compute), compute)
        to_keys = pl.ds(pl.multiple_of(column, columns), attended)
        precision = problem.precision
        queries, pulls = scaled[mine], cotangent[mine]
        scores = matmul(k[:attended], queries, contract=(1, 1), precision=precision)
        scores, slope = cap(scores, problem)
        allowed: list[Any] = []
        if q_ids is not None:
            allowed.append(jnp.tile(id_column[:attended], (1, compute // LANES)) == q_ids[:, mine])
        if mask_column is not None:
            allowed.append(jnp.tile(mask_column[:attended], (1, compute // LANES)) != 0)
        elif mask is not None:
            allowed.append(mask[:attended, mine].astype(jnp.int32) != 0)
        scores = hide(
            scores,
            problem.visibility,
            row=block * compute,
            column=column,
            edge=edge,
            shift=None if stair is None else stair * compute,
            allowed=allowed,
            by_keys=True,
        )
        weights = jnp.exp2(scores - lse[:, mine] * LOG2_E)
        dweights = matmul(v[:attended], pulls, contract=(1, 1), precision=precision)
        dscores = weights * (dweights - dots[:, mine])
        if slope is not None:
            dscores = dscores * slope
        narrow = dscores.astype(k.dtype)
        dv_sum[to_keys] += matmul(
            weights.astype(v.dtype), pulls, contract=(1, 0), precision=precision
        )
        dk_sum[to_keys] += matmul(narrow, queries, contract=(1, 0), precision=precision)
        dq_sum[mine] += matmul(narrow, k[:attended], contract=(0, 0), precision=precision)

    per_held = blocks.backward_q // compute
    held_first = i * per_held
    if table is not None:
        visit_listed(table, (j * q_steps + i) * (2 + per_held), held_first, update)
    else:
        _dense_blocks(problem, blocks, column, held_first, per_held, update)

    @when(j == kv_steps - 1, always=kv_steps == 1)
    def _() -> None:
        dq[...] = (dq_sum[...] * problem.scale).astype(dq.dtype)

    @pl.when((g == problem.group - 1) & (i == q_steps - 1))
    def _() -> None:
        dk[...] = (dk_sum[all_columns] * (problem.scale / problem.query_factor)).astype(dk.dtype)
        dv[...] = dv_sum[all_columns].astype(dv.dtype)


def _dense_blocks(
    problem: Problem,
    blocks: FlashBlocks,
    column: Position,
    held_first: Position,
    per_held: int,
    update: Any,
) -> None:
    visibility, columns, compute = problem.visibility, blocks.backward_kv, blocks.backward_q_compute
    span = visibility.queries_of(column, columns, block=compute)
    begin, end = maximum(span.first, held_first), minimum(span.end, held_first + per_held)
    # A block of queries on the diagonal attends only to the keys up to its last query.
    staircase = visibility.causal and not visibility.padding_is_visible and columns % compute == 0
    stairs = columns // compute if staircase else 0
    diagonal = jax.lax.div(column, jnp.int32(compute))
    full_begin = diagonal + stairs if staircase else span.full_first
    full_end = maximum(span.full_end, full_begin)

    def within(block: Position) -> Position:
        return minimum(maximum(block, begin), end)

    def visit_block(block: Position, carry: None, *, edge: bool) -> None:
        update(block, held_first, edge=edge)

    if staircase:

        @pl.when((diagonal >= held_first) & (diagonal < held_first + per_held))
        def _() -> None:
            for stair in range(stairs):
                update(diagonal + stair, held_first, edge=True, stair=stair)

    else:
        jax.lax.fori_loop(begin, within(full_begin), partial(visit_block, edge=True), None)
    jax.lax.fori_loop(within(full_begin), within(full_end), partial(visit_block, edge=False), None)
    # Else the last block is full, and libtpu 0.0.50 fails on a loop with no iterations.
    if visibility.window is not None or visibility.padding_is_visible:
        jax.lax.fori_loop(within(full_end), end, partial(visit_block, edge=True), None)
