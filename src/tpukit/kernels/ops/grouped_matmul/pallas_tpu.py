"""The grouped matmul as TPU kernels: a weight is multiplied only with tiles that have its rows."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....hardware.target import current_target
from ...blocks.tiling import Interpret, Ref, accumulate, tile_dot, zero_past_end
from ...blocks.tuned import blocks_for
from ...blocks.vmem import vmem_limit_bytes
from ...registry.op import KernelCase
from .blocks import (
    GroupedBlocks,
    GroupedShape,
    GroupedWork,
    Tiles,
    drhs_bytes,
    drhs_work,
    product_bytes,
    product_work,
)
from .visits import plan_visits

OP_NAME = "grouped_matmul"
Residuals = tuple[jax.Array, jax.Array, jax.Array]


def forward(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    blocks: GroupedBlocks | None = None,
    expected_rows: int | None = None,
    interpret: Interpret = False,
) -> tuple[jax.Array, Residuals]:
    """Return the result, and the arguments as residuals."""
    chosen = _blocks_for((lhs, rhs, group_sizes), blocks)
    out = _multiply(
        *(lhs, rhs, group_sizes),
        shape=_shape(lhs, rhs, expected_rows),
        tiles=(chosen.rows, chosen.contraction, chosen.columns),
        transposed=False,
        interpret=interpret,
    )
    return out, (lhs, rhs, group_sizes)


def backward(
    residuals: Residuals,
    cotangent: jax.Array,
    *,
    blocks: GroupedBlocks | None = None,
    expected_rows: int | None = None,
    interpret: Interpret = False,
) -> tuple[jax.Array, jax.Array, None]:
    """Return the gradients of lhs and rhs."""
    lhs, rhs, group_sizes = residuals
    chosen = _blocks_for((lhs, rhs, group_sizes), blocks)
    shape = _shape(lhs, rhs, expected_rows)
    d_lhs = _multiply(
        *(cotangent, rhs, group_sizes),
        shape=shape.transposed,
        tiles=(chosen.rows, chosen.dlhs_contraction, chosen.dlhs_columns),
        transposed=True,
        interpret=interpret,
    )
    d_rhs = _sum_by_group(
        *(lhs, cotangent, group_sizes),
        shape=shape,
        tiles=(chosen.drhs_rows, chosen.drhs_contraction, chosen.drhs_columns),
        dtype=rhs.dtype,
        interpret=interpret,
    )
    return d_lhs, d_rhs, None


def grouped_product(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    dtype: Any,
    transposed: bool,
    factor: float = 1.0,
    expected_rows: int | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Compute `multiply_groups`: the matmul, or that of the gradient with `transposed` weights."""
    # The forward pass's case in either direction, because blocks are chosen for all its matmuls
    # together.
    lhs = jax.ShapeDtypeStruct((rows.shape[0], weights.shape[1]), rows.dtype)
    chosen = _blocks_for((lhs, weights, group_sizes), None)
    shape = _shape(lhs, weights, expected_rows)
    forward_tiles = (chosen.rows, chosen.contraction, chosen.columns)
    backward_tiles = (chosen.rows, chosen.dlhs_contraction, chosen.dlhs_columns)
    return _multiply(
        *(rows, weights, group_sizes),
        shape=shape.transposed if transposed else shape,
        tiles=backward_tiles if transposed else forward_tiles,
        transposed=transposed,
        interpret=interpret,
        dtype=dtype,
        factor=factor,
    )


def grouped_sum(
    rows: jax.Array,
    others: jax.Array,
    group_sizes: jax.Array,
    scales: jax.Array,
    *,
    dtype: Any,
    expected_rows: int | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Compute `sum_groups`: the gradient of the weights, of operands in two formats."""
    weights = jax.ShapeDtypeStruct(
        (group_sizes.shape[0], rows.shape[1], others.shape[1]), rows.dtype
    )
    chosen = _blocks_for((rows, weights, group_sizes), None)
    return _sum_by_group(
        *(rows, others, group_sizes),
        shape=_shape(rows, weights, expected_rows),
        tiles=(chosen.drhs_rows, chosen.drhs_contraction, chosen.drhs_columns),
        dtype=dtype,
        interpret=interpret,
        scales=scales,
    )


def _multiply(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    shape: GroupedShape,
    tiles: Tiles,
    transposed: bool,
    interpret: Interpret,
    dtype: Any = None,
    factor: float = 1.0,
) -> jax.Array:
    """Multiply rows of lhs (M, C) by their group's weight (G, C, N), or (G, N, C) transposed.

    The result has the dtype of lhs unless `dtype` is given, and is multiplied by `factor` before it
    is rounded to that.
    """
    tile_rows, tile_sum, tile_columns = tiles
    rows, width = lhs.shape
    groups = rhs.shape[0]
    columns = rhs.shape[1] if transposed else rhs.shape[2]
    table = plan_visits(group_sizes, rows=rows, tile_rows=tile_rows, each_group=False)

    def row_place(j: Any, v: Any, k: Any, group: Any, tile: Any, filled: Any, offsets: Any) -> Any:
        # Rows past the last group are not read; the tile before them is in VMEM already.
        return filled[v], k

    def weight_place(
        j: Any, v: Any, k: Any, group: Any, tile: Any, filled: Any, offsets: Any
    ) -> Any:
        # Rows past the last group are group G, without a weight; the weight before is in VMEM
        # already.
        mine = jnp.minimum(group[v], groups - 1)
        return (mine, j, k) if transposed else (mine, k, j)

    weight_tile = (1, tile_columns, tile_sum) if transposed else (1, tile_sum, tile_columns)
    result = jax.ShapeDtypeStruct((rows, columns), dtype or lhs.dtype)
    wider = 2 * tile_rows * tile_columns * (result.dtype.itemsize - lhs.dtype.itemsize)
    return pl.pallas_call(
        partial(_multiply_kernel, groups=groups, width=width, transposed=transposed, factor=factor),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(columns, tile_columns), table.visits, pl.cdiv(width, tile_sum)),
            in_specs=[
                pl.BlockSpec((tile_rows, tile_sum), row_place),
                pl.BlockSpec(weight_tile, weight_place),
            ],
            out_specs=pl.BlockSpec(
                (tile_rows, tile_columns), lambda j, v, k, group, tile, *_: (tile[v], j)
            ),
            scratch_shapes=[pltpu.VMEM((tile_rows, tile_columns), jnp.float32)],
        ),
        out_shape=result,
        compiler_params=_compiler_params(product_bytes(*tiles, lhs.dtype.itemsize) + wider),
        cost_estimate=_cost(product_work(shape, tiles)),
        interpret=interpret,
        name="grouped_matmul_dlhs" if transposed else OP_NAME,
    )(table.group, table.tile, table.filled, table.offsets, lhs, rhs)


def _multiply_kernel(
    group: Ref,
    tile: Ref,
    filled: Ref,
    offsets: Ref,
    lhs: Ref,
    rhs: Ref,
    out: Ref,
    total: Ref,
    *,
    groups: int,
    width: int,
    transposed: bool,
    factor: float,
) -> None:
    del filled  # only used by index maps
    visit, step, steps = pl.program_id(1), pl.program_id(2), pl.num_programs(2)
    mine = group[visit]

    @pl.when(mine < groups)
    def _product() -> None:
        first = step * lhs.shape[1]
        left = zero_past_end(lhs[...], first, width, axis=1)
        right = zero_past_end(rhs[0], first, width, axis=1 if transposed else 0)
        product = tile_dot(left, right, contract=(1, 1 if transposed else 0))
        accumulate(total, product, step)

    @pl.when(step == steps - 1)
    def _store() -> None:
        is_mine = _rows_of_group(offsets, mine, tile[visit], out.shape)
        opens_tile = (visit == 0) | (tile[visit] != tile[jnp.maximum(visit - 1, 0)])
        scaled = total[...] if factor == 1.0 else total[...] * factor
        result = jnp.where(mine < groups, scaled, 0.0).astype(out.dtype)

        @pl.when(opens_tile)
        def _first() -> None:
            out[...] = jnp.where(is_mine, result, jnp.zeros_like(result))

        @pl.when(jnp.logical_not(opens_tile))
        def _join() -> None:
            out[...] = jnp.where(is_mine, result, out[...])


def _sum_by_group(
    lhs: jax.Array,
    cotangent: jax.Array,
    group_sizes: jax.Array,
    *,
    shape: GroupedShape,
    tiles: Tiles,
    dtype: Any,
    interpret: Interpret,
    scales: jax.Array | None = None,
) -> jax.Array:
    """Multiply the transposed lhs (M, K) by the cotangent (M, N), by group: (G, K, N).

    With `scales` (1, N) every column is rounded to `dtype` and multiplied by its scale.
    """
    tile_rows, tile_width, tile_columns = tiles
    (rows, width), columns, groups = lhs.shape, cotangent.shape[1], group_sizes.shape[0]
    table = plan_visits(group_sizes, rows=rows, tile_rows=tile_rows, each_group=True)
    wider = 2 * tile_width * tile_columns * (jnp.dtype(dtype).itemsize - lhs.dtype.itemsize)
    own_scales = () if scales is None else (scales,)
    return pl.pallas_call(
        partial(_sum_kernel, scaled=scales is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(width, tile_width), pl.cdiv(columns, tile_columns), table.visits),
            in_specs=[
                *(pl.BlockSpec((1, tile_columns), lambda i, j, *_: (0, j)) for _ in own_scales),
                pl.BlockSpec((tile_rows, tile_width), lambda i, j, v, group, tile, _: (tile[v], i)),
                pl.BlockSpec(
                    (tile_rows, tile_columns), lambda i, j, v, group, tile, _: (tile[v], j)
                ),
            ],
            out_specs=pl.BlockSpec(
                (1, tile_width, tile_columns), lambda i, j, v, group, tile, _: (group[v], i, j)
            ),
            scratch_shapes=[pltpu.VMEM((tile_width, tile_columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((groups, width, columns), dtype),
        compiler_params=_compiler_params(drhs_bytes(*tiles, lhs.dtype.itemsize) + wider),
        cost_estimate=_cost(drhs_work(shape, tiles)),
        interpret=interpret,
        name="grouped_matmul_drhs",
    )(table.group, table.tile, table.offsets, *own_scales, lhs, cotangent)


def _sum_kernel(group: Ref, tile: Ref, offsets: Ref, *refs: Ref, scaled: bool) -> None:
    lhs, cotangent, out, total = refs[-4:]
    visit, visits = pl.program_id(2), pl.num_programs(2)
    mine = group[visit]
    last = visits - 1

    @pl.when((visit == 0) | (group[jnp.maximum(visit - 1, 0)] != mine))
    def _start() -> None:
        total[...] = jnp.zeros(total.shape, total.dtype)

    @pl.when(offsets[mine] < offsets[mine + 1])
    def _add() -> None:
        # Mask both sides: rows of other groups must not count, and rows past the end may be NaN.
        left, right = (
            jnp.where(_rows_of_group(offsets, mine, tile[visit], ref.shape), ref[...], 0).astype(
                ref.dtype
            )
            for ref in (lhs, cotangent)
        )
        total[...] += tile_dot(left, right, contract=(0, 0))

    @pl.when((visit == last) | (group[jnp.minimum(visit + 1, last)] != mine))
    def _store() -> None:
        rounded = total[...].astype(out.dtype)
        if scaled:  # in float32, which every chip multiplies
            rounded = (rounded.astype(jnp.float32) * refs[0][...]).astype(out.dtype)
        out[0] = rounded


def _shape(
    lhs: jax.Array | jax.ShapeDtypeStruct,
    rhs: jax.Array | jax.ShapeDtypeStruct,
    expected_rows: int | None,
) -> GroupedShape:
    groups, width, columns = rhs.shape
    rows = lhs.shape[0] if expected_rows is None else min(expected_rows, lhs.shape[0])
    empty = lhs.shape[0] - rows
    return GroupedShape(rows, width, columns, groups, lhs.dtype.itemsize, empty_rows=empty)


def _rows_of_group(offsets: Any, group: Any, tile: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return which rows of a tile belong to a group, as booleans of the tile's shape."""
    row = tile * shape[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= offsets[group]) & (row < offsets[group + 1])


def _blocks_for(
    arrays: Iterable[jax.Array | jax.ShapeDtypeStruct], blocks: GroupedBlocks | None
) -> GroupedBlocks:
    shapes = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)
    return blocks_for(OP_NAME, KernelCase("traced", shapes), blocks)


def _cost(work: GroupedWork) -> pl.CostEstimate:
    """Return the cost, for the scheduler and the timeline."""
    return pl.CostEstimate(flops=work.flops, bytes_accessed=work.hbm_bytes, transcendentals=0)


def _compiler_params(used_bytes: int) -> Any:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary", "arbitrary"),
        vmem_limit_bytes=vmem_limit_bytes(used_bytes, current_target()),
    )
