"""Which blocks of keys the forward kernel visits, in which order, and what a mask's table lists."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...blocks.tiling import round_up
from .problem import LANES, FlashBlocks, Problem
from .scores import when
from .visibility import Position, Visibility, ceil_div, maximum, minimum


def visit_listed(table: Any, entry: Position, held_first: Position, update: Any) -> None:
    """Visit the blocks of a block mask's table, whole ones first."""
    whole, listed = table[entry], table[entry + 1]

    def one(number: Position, carry: None, *, edge: bool) -> None:
        update(held_first + table[entry + 2 + number], held_first, edge=edge)

    jax.lax.fori_loop(0, whole, partial(one, edge=False), None)
    jax.lax.fori_loop(whole, listed, partial(one, edge=True), None)


def visit_visible(
    problem: Problem, blocks: FlashBlocks, row: Position, step: Position, per_held: int, update: Any
) -> None:
    """Visit the blocks that some query attends to, from the first key on, the diagonal last."""
    visibility, rows, compute = problem.visibility, blocks.block_q, blocks.block_kv_compute
    held = visibility.keys_of(row, rows, block=blocks.block_kv)
    held_first = (held.first + step) * per_held
    span = visibility.keys_of(row, rows, block=compute)
    begin, end = maximum(span.first, held_first), minimum(span.end, held_first + per_held)
    # Queries above a block on the diagonal attend to none of it: cut it into a staircase.
    staircase = visibility.causal and not visibility.padding_is_visible and rows % compute == 0
    full_end = jax.lax.div(row, jnp.int32(compute)) if staircase else span.full_end
    full_begin = minimum(span.full_first, full_end)

    def within(block: Position) -> Position:
        return minimum(maximum(block, begin), end)

    def one(block: Position, carry: None, *, edge: bool) -> None:
        update(block, held_first, edge=edge)

    if visibility.window is not None and staircase:
        _window_edge(visibility, rows, compute, full_end, begin, end, held_first, update)
    elif visibility.window is not None:
        jax.lax.fori_loop(begin, within(full_begin), partial(one, edge=True), None)
    first, last = within(full_begin), within(full_end)
    rest = first
    if blocks.unroll > 1:
        rounds = jax.lax.div(maximum(last - first, 0), jnp.int32(blocks.unroll))

        def many(number: Position, carry: None) -> None:
            for k in range(blocks.unroll):
                update(first + number * blocks.unroll + k, held_first, edge=False)

        jax.lax.fori_loop(0, rounds, many, None)
        rest = first + rounds * blocks.unroll
    jax.lax.fori_loop(rest, last, partial(one, edge=False), None)
    if not staircase:
        jax.lax.fori_loop(last, end, partial(one, edge=True), None)
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
    """The blocks that only the first queries still attend to: a staircase as well, going down."""
    assert visibility.window is not None
    nearest = max(visibility.window - rows, 0) // compute + 1
    farthest = ceil_div(visibility.window - 1, compute)
    # In the first rows some of them lie before the first key.
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
    """The queries that attend to any of `keys` keys, the first `offset` behind the first query."""
    if visibility.window is None:
        return slice(max(offset, 0), rows)
    return slice(max(offset, 0), min(rows, round_up(offset + keys - 1 + visibility.window, LANES)))
