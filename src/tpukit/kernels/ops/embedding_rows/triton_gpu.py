"""The gradient of looked-up rows on an NVIDIA GPU: no token waits for another's addition.

XLA adds each token's gradient to its row with atomic operations, rounding every time, and words are
not evenly frequent: by Zipf's law a tenth of all tokens queues for one row. Here tokens are sorted
by row, and each row is added up by one program: in float32, in a fixed order. On an H200, 32768
tokens of width 2048 by Zipf's law take 0.5 ms instead of 22.9, and evenly drawn ones as long.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ...blocks.tiling import dividing_columns
from . import reference

TOKENS = 32  # that a program reads at once
WIDEST = 256  # columns of one program
_WARPS = 4


def fits(table: jax.Array) -> bool:
    """Whether the kernel takes rows of this width."""
    return dividing_columns(table.shape[1], most=WIDEST) >= 128


def backward(
    residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, None]:
    """The gradient of the table."""
    ids, table = residuals
    width, rows = cotangent.shape[-1], table.shape[0]
    at = reference.row_numbers(ids.reshape(-1), rows)
    values = cotangent.reshape(-1, width)
    return summed_by_row(values, at, rows, dtype=table.dtype, interpret=interpret), None


def summed_by_row(
    values: jax.Array, at: jax.Array, rows: int, *, dtype: Any, interpret: bool = False
) -> jax.Array:
    """(T, width) values added up in the row that `at` (T,) names for each: (rows, width)."""
    width = values.shape[1]
    columns = dividing_columns(width, most=WIDEST)
    ordered, order = jax.lax.sort_key_val(
        at.astype(jnp.int32), jnp.arange(at.shape[0], dtype=jnp.int32)
    )
    first = jnp.searchsorted(ordered, jnp.arange(rows + 1, dtype=jnp.int32)).astype(jnp.int32)
    call: Any = pl.pallas_call(
        partial(_row, columns=columns),
        grid=(rows, width // columns),
        out_shape=jax.ShapeDtypeStruct((rows, width), dtype),
        compiler_params=triton.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="summed_by_row",
    )
    return call(values, order, first)


def _row(values_ref: Any, order_ref: Any, first_ref: Any, out_ref: Any, *, columns: int) -> None:
    row = pl.program_id(0)
    part = pl.ds(pl.program_id(1) * columns, columns)
    start, end = first_ref[row], first_ref[row + 1]

    def add(step: Any, total: jax.Array) -> jax.Array:
        place = start + step * TOKENS + jnp.arange(TOKENS)
        token = order_ref[jnp.minimum(place, end - 1)]  # the last one again, where there are fewer
        read = values_ref[token, part].astype(jnp.float32)
        return total + jnp.sum(jnp.where((place < end)[:, None], read, 0.0), axis=0)

    steps = (end - start + TOKENS - 1) // TOKENS
    total = jax.lax.fori_loop(0, steps, add, jnp.zeros((columns,), jnp.float32))
    out_ref[row, part] = total.astype(out_ref.dtype)
