"""What forward and backward kernels share: masks inside a block, the cap, rotation by RoPE."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...blocks.tiling import round_up
from ..rope.tables import RopeTables
from .problem import LANES, LOG2_E, MASKED, Problem
from .visibility import Position, Span, Visibility


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
    """Scores, at `MASKED` where a query does not attend to a key.

    Args:
        scores: A block of (queries, keys), or of (keys, queries).
        visibility: Which keys a query attends to.
        row: The first query.
        column: The first key.
        edge: Whether positions in the block mask a part of it.
        shift: How many tokens the first query lies behind the first key, where that is known
            while tracing: only the parts that need a mask then get one.
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
    # Along the first axis: where keys begin to lie behind a query, or end to, and likewise
    # where they begin or end to be too far before it.
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
    """Mask by position, where the first query lies `shift` tokens behind the first key."""
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
    """`pl.when`, without a branch that keeps the compiler from overlapping what always runs."""

    def run(body: Callable[[], None]) -> None:
        body() if always else pl.when(condition)(body)

    return run


def cap(scores: Any, problem: Problem) -> tuple[Any, Any]:
    """Scores in powers of two, and the slope of the cap (None without one)."""
    if problem.soft_cap is None:
        return scores, None
    bent = jnp.tanh(scores)
    return bent * (problem.soft_cap * LOG2_E), 1.0 - bent * bent


def rotate(x: Any, cos: Any, sin: Any, *, width: int) -> Any:
    """RoPE on float32 rows whose tables are as `lane_tables` makes them."""
    half, lanes = width // 2, x.shape[1]
    partner = pltpu.roll(x, half, 1)
    if width != lanes:
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        partner = jnp.where(lane < half, pltpu.roll(x, lanes - half, 1), partner)
    return x * cos + partner * sin


def lane_tables(rope: RopeTables, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and signed sines as (1 or B, tokens, lanes), for both halves of a head."""
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
    """The inner blocks to compute for each (outer block, step) of a block mask, flat.

    An entry is the number of whole blocks, the number of all blocks, then their numbers inside
    the step, whole ones first; `outer` counts blocks of queries, or of keys if `by_keys`.
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
        whole, edge = _sorted_blocks(blocks[number], span)
        for step in range(steps):
            inside = [
                [
                    block - step * inner_per_step
                    for block in found
                    if block // inner_per_step == step
                ]
                for found in (whole, edge)
            ]
            listed = inside[0] + inside[1]
            table[number, step, : 2 + len(listed)] = [len(inside[0]), len(listed), *listed]
    return table.reshape(-1)


def _sorted_blocks(wanted: np.ndarray, span: Span) -> tuple[list[int], list[int]]:
    inside = [int(b) for b in np.flatnonzero(wanted) if span.first <= b < span.end]
    whole = [b for b in inside if span.full_first <= b < span.full_end]
    return whole, [b for b in inside if b not in set(whole)]
