"""The grouped matmul on an NVIDIA GPU, in Triton: one program per tile of the result.

XLA multiplies every row by every group's weight there and keeps one of the results. Here a tile of
rows is visited once for each group that has rows in it, and stores only those rows.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ...blocks.tiling import Ref
from ...registry.dispatch import recomputed
from .reference import grouped_matmul_xla
from .visits import plan_visits

# Concurrent tiles share rows and columns when they form a block; with this many rows of tiles the
# block's operands stay in the cache.
_NEIGHBOURS = 8


@dataclass(frozen=True)
class Tiles:
    """The tile of a program: rows and columns of its result, and the depth of a step."""

    rows: int
    columns: int
    depth: int
    warps: int = 8
    stages: int = 3


FORWARD = Tiles(rows=128, columns=256, depth=64)
WEIGHTS = Tiles(rows=128, columns=256, depth=64)


def fits(lhs: jax.Array, rhs: jax.Array) -> bool:
    """Whether the kernels support these arrays: full tiles of a dtype for tensor cores."""
    (rows, _), (_, inner, columns) = lhs.shape, rhs.shape
    tile = FORWARD.columns
    is_narrow = lhs.dtype in (jnp.bfloat16, jnp.float16)
    return is_narrow and not (rows % FORWARD.rows or inner % tile or columns % tile)


def forward(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Multiply each row by the weight of its group; rows past the last group are zero."""
    if not fits(lhs, rhs):
        # A device's shard of the rows may not be full tiles even if all rows are.
        return grouped_matmul_xla(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)
    product = rows_times_weights(lhs, rhs, group_sizes, interpret=interpret)
    return product, (lhs, rhs, group_sizes)


def backward(
    residuals: tuple[jax.Array, ...], cotangent: jax.Array, *, interpret: bool = False
) -> tuple[Any, ...]:
    """Return the gradients of rows and weights."""
    lhs, rhs, group_sizes = residuals
    if not fits(lhs, rhs):
        by_xla = recomputed(grouped_matmul_xla, constants=1)
        return by_xla.backward(residuals, cotangent)
    d_lhs = rows_times_weights(cotangent, rhs, group_sizes, is_transposed=True, interpret=interpret)
    d_rhs = rows_times_rows(lhs, cotangent, group_sizes, interpret=interpret)
    return d_lhs, d_rhs, None


def rows_times_weights(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    is_transposed: bool = False,
    tiles: Tiles = FORWARD,
    interpret: bool = False,
) -> jax.Array:
    """Multiply (M, K) by (G, K, N), or by (G, N, K) when transposed, giving (M, N)."""
    rows = lhs.shape[0]
    columns = rhs.shape[1] if is_transposed else rhs.shape[2]
    visits = plan_visits(group_sizes, rows=rows, tile_rows=tiles.rows, each_group=False)
    most = visits.group.shape[0]
    call: Any = pl.pallas_call(
        partial(_product_tile, tiles=tiles, most=most, is_transposed=is_transposed),
        grid=(most * (columns // tiles.columns),),
        out_shape=jax.ShapeDtypeStruct((rows, columns), lhs.dtype),
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="grouped_matmul",
    )
    return call(lhs, rhs, visits.group, visits.tile, visits.offsets, visits.visits[None])


def rows_times_rows(
    lhs: jax.Array,
    cotangent: jax.Array,
    group_sizes: jax.Array,
    *,
    tiles: Tiles = WEIGHTS,
    interpret: bool = False,
) -> jax.Array:
    """Multiply (M, K) and (M, N) over the rows of each group, giving (G, K, N)."""
    groups, inner, columns = group_sizes.shape[0], lhs.shape[1], cotangent.shape[1]
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    call: Any = pl.pallas_call(
        partial(_weight_tile, tiles=tiles),
        grid=((inner // tiles.rows) * (columns // tiles.columns), groups),
        out_shape=jax.ShapeDtypeStruct((groups, inner, columns), lhs.dtype),
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="grouped_matmul_weights",
    )
    return call(lhs, cotangent, ends - group_sizes.astype(jnp.int32), ends)


def _block_order(place: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """Return row and column of the tile at `place`, in blocks of neighbouring rows."""
    block = place // (_NEIGHBOURS * columns)
    within = place % (_NEIGHBOURS * columns)
    height = jnp.minimum(rows - block * _NEIGHBOURS, _NEIGHBOURS)
    return block * _NEIGHBOURS + within % height, within // height


def _product_tile(
    lhs_ref: Ref,
    rhs_ref: Ref,
    group_ref: Ref,
    tile_ref: Ref,
    offsets_ref: Ref,
    visits_ref: Ref,
    out_ref: Ref,
    *,
    tiles: Tiles,
    most: int,
    is_transposed: bool,
) -> None:
    visit, column = _block_order(pl.program_id(0), most, out_ref.shape[1] // tiles.columns)

    @pl.when(visit < visits_ref[0])
    def _() -> None:
        group = group_ref[visit]
        row_0, column_0 = tile_ref[visit] * tiles.rows, column * tiles.columns
        rows, columns = pl.ds(row_0, tiles.rows), pl.ds(column_0, tiles.columns)
        groups = rhs_ref.shape[0]
        weight = jnp.minimum(group, groups - 1)  # rows past the last group have none

        def add(step: Any, total: jax.Array) -> jax.Array:
            depth = pl.ds(step * tiles.depth, tiles.depth)
            left = triton.load(lhs_ref.at[rows, depth])
            if is_transposed:
                right = triton.load(rhs_ref.at[weight, columns, depth]).T
            else:
                right = triton.load(rhs_ref.at[weight, depth, columns])
            return total + triton.dot(left, right)

        zeros = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
        total = jax.lax.fori_loop(0, lhs_ref.shape[1] // tiles.depth, add, zeros)
        total = jnp.where(group < groups, total, 0.0)
        row = row_0 + jnp.arange(tiles.rows)
        is_ours = (row >= offsets_ref[group]) & (row < offsets_ref[group + 1])
        mask = jnp.broadcast_to(is_ours[:, None], total.shape)
        triton.store(out_ref.at[rows, columns], total.astype(out_ref.dtype), mask=mask)


def _weight_tile(
    lhs_ref: Ref, cotangent_ref: Ref, start_ref: Ref, end_ref: Ref, out_ref: Ref, *, tiles: Tiles
) -> None:
    group = pl.program_id(1)
    _, height, width = out_ref.shape
    tall, wide = _block_order(pl.program_id(0), height // tiles.rows, width // tiles.columns)
    inner, columns = (
        pl.ds(tall * tiles.rows, tiles.rows),
        pl.ds(wide * tiles.columns, tiles.columns),
    )
    start, end = start_ref[group], end_ref[group]
    first = start // tiles.depth

    def add(step: Any, total: jax.Array) -> jax.Array:
        row_0 = step * tiles.depth
        row = row_0 + jnp.arange(tiles.depth)
        is_ours = (row >= start) & (row < end)

        def read(ref: Ref, part: Any, size: int) -> jax.Array:
            mask = jnp.broadcast_to(is_ours[:, None], (tiles.depth, size))
            return triton.load(ref.at[pl.ds(row_0, tiles.depth), part], mask=mask, other=0.0)

        left = read(lhs_ref, inner, tiles.rows)
        right = read(cotangent_ref, columns, tiles.columns)
        return total + triton.dot(left.T, right)

    zeros = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
    total = jax.lax.fori_loop(first, (end + tiles.depth - 1) // tiles.depth, add, zeros)
    out_ref[group, inner, columns] = total.astype(out_ref.dtype)
