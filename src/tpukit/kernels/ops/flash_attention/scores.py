"""What forward and backward kernels share: masks within a block, the soft cap, RoPE, visits."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...blocks.tiling import round_up
from ..rope import RopeTables
from .problem import LANES, LOG2_E, MASKED, FlashBlocks, Problem, pad_tokens
from .visibility import Position, Span, Visibility, ceil_div, maximum, minimum


def hide(
    scores: Any,
    visibility: Visibility,
    *,
    row: Position,
    column: Position,
    edge: bool,
    shift: int | None,
    allowed: Sequence[Any],
    by_keys: bool = False,
) -> Any:
    """Set scores to `MASKED` where a query does not attend to a key.

    Args:
        scores: A block of (queries, keys), or of (keys, queries).
        visibility: Which keys a query attends to.
        row: The first query.
        column: The first key.
        edge: Whether positions in the block mask a part of it.
        shift: How many tokens the first query is behind the first key, where that is known while
            tracing, so that only parts that need a mask get one.
        allowed: Booleans that must all be True.
        by_keys: Whether keys come first.
    """
    for test in allowed:
        scores = jnp.where(test, scores, MASKED)
    if not edge:
        return scores
    if shift is None:
        behind = visibility.distance(row, column)
        return _hide_edge(scores, visibility, behind, visibility.kv_len - column, by_keys)
    size, across = scores.shape
    window = visibility.window or size + across + shift
    # Along the first axis: where keys start or stop being after a query, and where they start or
    # stop being too far before it.
    if by_keys:
        cuts = (shift, round_up(shift + across - window, LANES))
    else:
        cuts = (across - shift, (window - shift) // LANES * LANES)
    places = sorted({0, size, *(cut for cut in cuts if 0 < cut < size)})
    parts = [
        _hide_edge(
            scores[start:stop], visibility, shift - start if by_keys else shift + start, 0, by_keys
        )
        for start, stop in pairwise(places)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _hide_edge(
    scores: Any, visibility: Visibility, shift: Position, keys_left: Position, by_keys: bool
) -> Any:
    """Mask by position, where the first query is `shift` tokens behind the first key."""
    rows = jax.lax.broadcasted_iota(jnp.int32, scores.shape, int(by_keys))
    columns = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1 - int(by_keys))
    queries, keys = reversed(scores.shape) if by_keys else scores.shape
    known = isinstance(shift, int)
    keep: list[Any] = []
    if visibility.causal and not (known and shift >= keys - 1):
        keep.append(columns - rows <= shift)
    if visibility.window is not None:
        if not (known and shift + queries <= visibility.window):
            keep.append(columns - rows > shift - visibility.window)
        if visibility.symmetric:
            keep.append(columns - rows < shift + visibility.window)
    if visibility.padding_is_visible:
        keep.append(columns < keys_left)
    for test in keep:
        scores = jnp.where(test, scores, MASKED)
    return scores


def when(condition: Any, *, always: bool) -> Callable[[Callable[[], None]], None]:
    """Apply `pl.when`, without a branch for a constant, which would prevent overlap."""

    def run(body: Callable[[], None]) -> None:
        body() if always else pl.when(condition)(body)

    return run


def cap(scores: Any, problem: Problem) -> tuple[Any, Any]:
    """Return scores in powers of two, and the slope of the cap (None without one)."""
    if problem.soft_cap is None:
        return scores, None
    bent = jnp.tanh(scores)
    return bent * (problem.soft_cap * LOG2_E), 1.0 - bent * bent


def rotate(x: Any, cos: Any, sin: Any, *, width: int) -> Any:
    """Apply RoPE to float32 rows, with tables from `lane_tables`."""
    half, lanes = width // 2, x.shape[1]
    partner = pltpu.roll(x, half, 1)
    if width != lanes:
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        partner = jnp.where(lane < half, pltpu.roll(x, lanes - half, 1), partner)
    return x * cos + partner * sin


def lane_tables(rope: RopeTables, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return cosines and signed sines as (1 or B, tokens, lanes), for both halves of a head."""
    cos, sin = (x[None] if x.ndim == 2 else x for x in rope)
    tables = (jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1))
    lanes = round_up(tables[0].shape[-1], LANES)

    def grown(x: jax.Array) -> jax.Array:
        x = x[:, :tokens].astype(jnp.float32)
        return jnp.pad(x, ((0, 0), (0, tokens - x.shape[1]), (0, lanes - x.shape[2])))

    return grown(tables[0]), grown(tables[1])


def sparse_table(
    visibility: Visibility, *, outer: int, steps: int, inner_per_step: int, by_keys: bool
) -> np.ndarray:
    """Return the inner blocks to compute for each (outer block, step) of a block mask, flat.

    An entry is the number of full blocks, the number of all blocks, then their numbers within the
    step, full ones first; `outer` counts blocks of queries, or of keys if `by_keys`.
    """
    assert visibility.mask is not None
    size = visibility.mask.block_size
    blocks = visibility.mask.to_array()
    blocks = blocks.T if by_keys else blocks
    table = np.zeros((outer, steps, 2 + inner_per_step), np.int32)
    for number in range(outer):
        span = (visibility.queries_of if by_keys else visibility.keys_of)(
            number * size, size, block=size
        )
        full, edge = _sorted_blocks(blocks[number], span)
        for step in range(steps):
            inside = [
                [
                    block - step * inner_per_step
                    for block in numbers
                    if block // inner_per_step == step
                ]
                for numbers in (full, edge)
            ]
            listed = inside[0] + inside[1]
            table[number, step, : 2 + len(listed)] = [len(inside[0]), len(listed), *listed]
    return table.reshape(-1)


def _sorted_blocks(wanted: np.ndarray, span: Span) -> tuple[list[int], list[int]]:
    inside = [int(b) for b in np.flatnonzero(wanted) if span.first <= b < span.end]
    full = [b for b in inside if span.full_first <= b < span.full_end]
    return full, [b for b in inside if b not in set(full)]


# From a grid step to its example, head, block of queries and block of keys.
Step = Callable[..., tuple[Position, Position, Position, Position]]


def stream_mask(
    mask: jax.Array,
    step: Step,
    *,
    tokens: tuple[int, int],
    block: tuple[int, int],
    by_keys: bool = False,
) -> tuple[jax.Array, pl.BlockSpec]:
    """Return the mask as a kernel's argument, and the spec of a grid step's block.

    Args:
        mask: Booleans (B or 1, H or 1, queries or 1, keys).
        step: (grid step) -> example, head, block of queries and block of keys.
        tokens: Queries and keys to pad it to, with False.
        block: Queries and keys of a step.
        by_keys: Whether the kernel's scores are (keys, queries).

    Returns:
        A byte per score, in the order of the kernel's scores. Where all queries share a row, that
        row in words, which the kernel broadcasts over queries.
    """
    each_example, each_head, each_query = (size > 1 for size in mask.shape[:3])
    transposed = by_keys and each_query
    mask = pad_tokens(mask, tokens[1], axis=3)
    if each_query:
        mask = pad_tokens(mask, tokens[0], axis=2)
    mask = mask.swapaxes(2, 3) if transposed else mask

    def index(*grid: Position) -> tuple[Position, ...]:
        example, head, queries, keys = step(*grid)
        across = (queries if each_query else 0, keys)
        outer = (example if each_example else 0, head if each_head else 0)
        return (*outer, *(across[::-1] if transposed else across))

    shape = (block[0] if each_query else 1, block[1])
    spec = pl.BlockSpec((None, None, *(shape[::-1] if transposed else shape)), index)
    return mask.astype(jnp.int8 if each_query else jnp.int32), spec


def visit_listed(table: Any, entry: Position, held_first: Position, update: Any) -> None:
    """Visit the blocks of a block mask's table, full ones first."""
    full, listed = table[entry], table[entry + 1]

    def visit_block(number: Position, carry: None, *, edge: bool) -> None:
        update(held_first + table[entry + 2 + number], held_first, edge=edge)

    jax.lax.fori_loop(0, full, partial(visit_block, edge=False), None)
    jax.lax.fori_loop(full, listed, partial(visit_block, edge=True), None)


def visit_visible(
    problem: Problem, blocks: FlashBlocks, row: Position, step: Position, per_held: int, update: Any
) -> None:
    """Visit the blocks that some query attends to, from the first key on, the diagonal last."""
    visibility, rows, compute = problem.visibility, blocks.block_q, blocks.block_kv_compute
    held = visibility.keys_of(row, rows, block=blocks.block_kv)
    held_first = (held.first + step) * per_held
    span = visibility.keys_of(row, rows, block=compute)
    begin, end = maximum(span.first, held_first), minimum(span.end, held_first + per_held)
    # Queries above a block on the diagonal attend to none of it, so it is cut into steps.
    staircase = visibility.causal and not visibility.padding_is_visible and rows % compute == 0
    full_end = jax.lax.div(row, jnp.int32(compute)) if staircase else span.full_end
    full_begin = minimum(span.full_first, full_end)

    def within(block: Position) -> Position:
        return minimum(maximum(block, begin), end)

    def visit_block(block: Position, carry: None, *, edge: bool) -> None:
        update(block, held_first, edge=edge)

    if visibility.window is not None and staircase:
        _window_edge(visibility, rows, compute, full_end, begin, end, held_first, update)
    elif visibility.window is not None:
        jax.lax.fori_loop(begin, within(full_begin), partial(visit_block, edge=True), None)
    first, last = within(full_begin), within(full_end)
    rest = first
    if blocks.unroll > 1:
        rounds = jax.lax.div(maximum(last - first, 0), jnp.int32(blocks.unroll))

        def many(number: Position, carry: None) -> None:
            for k in range(blocks.unroll):
                update(first + number * blocks.unroll + k, held_first, edge=False)

        jax.lax.fori_loop(0, rounds, many, None)
        rest = first + rounds * blocks.unroll
    jax.lax.fori_loop(rest, last, partial(visit_block, edge=False), None)
    if not staircase:
        jax.lax.fori_loop(last, end, partial(visit_block, edge=True), None)
        return

    inside = (full_end >= held_first) & (full_end < held_first + per_held)

    @when(inside, always=visibility.kv_len <= blocks.block_kv)
    def _() -> None:
        for stair in range(rows // compute):
            update(full_end + stair, held_first, edge=True, offset=stair * compute)


def _window_edge(
    visibility: Visibility,
    rows: int,
    compute: int,
    diagonal: Position,
    begin: Position,
    end: Position,
    held_first: Position,
    update: Any,
) -> None:
    """Visit the blocks at the far end of a window, to which only the first queries attend."""
    assert visibility.window is not None
    nearest = max(visibility.window - rows, 0) // compute + 1
    farthest = ceil_div(visibility.window - 1, compute)
    # In the first rows, some of them are before the first key.
    all_there = (diagonal - farthest >= begin) & (diagonal - nearest < end)

    @pl.when(all_there)
    def _() -> None:
        for number in range(farthest, nearest - 1, -1):
            update(diagonal - number, held_first, edge=True, offset=-number * compute)

    @pl.when(jnp.logical_not(all_there))
    def _() -> None:
        last = minimum(maximum(diagonal - nearest + 1, begin), end)
        jax.lax.fori_loop(begin, last, lambda block, _: update(block, held_first, edge=True), None)


def rows_attending(visibility: Visibility, offset: int, keys: int, rows: int) -> slice:
    """Return the queries that attend to any of `keys` keys, `offset` after the first query."""
    if visibility.window is None:
        return slice(max(offset, 0), rows)
    return slice(max(offset, 0), min(rows, round_up(offset + keys - 1 + visibility.window, LANES)))
