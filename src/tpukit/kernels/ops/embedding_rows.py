"""`embedding_rows`: a lookup of table rows, with a Triton kernel for its gradient on an NVIDIA GPU.

XLA adds each token's gradient to its row with atomic operations, rounding every time, and words are
not evenly frequent: by Zipf's law a tenth of all tokens queues for one row. The kernel sorts tokens
by row and adds each row up in one program: in float32, in a fixed order. On an H200, 32768 tokens
of width 2048 by Zipf's law take 0.5 ms instead of 22.9 ms, and evenly drawn tokens 0.5 ms as well.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ..blocks.tiling import dividing_columns
from ..partition.splits import Splits
from ..registry.dispatch import Passes, dispatch_with_gradient
from ..registry.op import REFERENCE, TRITON

TOKENS = 32  # that a program reads at once
WIDEST = 256  # columns of one program
_WARPS = 4
Residuals = tuple[jax.Array, jax.Array]


def embedding_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Return `table[ids]`: (rows, width) indexed by (…) gives (…, width).

    Args:
        table: The rows.
        ids: Row numbers, integers; they have no gradient.
    """
    return dispatch_with_gradient(
        "embedding_rows",
        PASSES,
        table,
        ids,
        splits=SPLITS,
        on_tpu=REFERENCE,
        on_gpu=TRITON if has_kernel(table) else REFERENCE,
    )


def forward(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, Residuals]:
    """Return `table[ids]`; the residuals are the ids, and the table's height and dtype."""
    # An empty slice of the table carries both.
    return table[ids], (ids, table[:, :0])


def backward(residuals: Residuals, cotangent: jax.Array) -> tuple[jax.Array, None]:
    """Return the gradient of the table: each token's gradient added to its row."""
    ids, table = residuals
    at = _row_numbers(ids, table.shape[0])
    zeros = jnp.zeros((table.shape[0], cotangent.shape[-1]), table.dtype)
    return zeros.at[at].add(cotangent.astype(table.dtype)), None


def has_kernel(table: jax.Array) -> bool:
    """Whether the Triton kernel supports rows of this width."""
    return dividing_columns(table.shape[1], most=WIDEST) >= 128


def triton_backward(
    residuals: Residuals, cotangent: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, None]:
    """Return the gradient of the table, computed without atomic operations."""
    ids, table = residuals
    width, rows = cotangent.shape[-1], table.shape[0]
    at = _row_numbers(ids.reshape(-1), rows)
    values = cotangent.reshape(-1, width)
    return sum_by_row(values, at, rows, dtype=table.dtype, interpret=interpret), None


PASSES = {
    TRITON: Passes(forward, triton_backward),
    REFERENCE: Passes(forward, backward),
}
# Each device may have some tokens or some columns; gradients of the tokens' shards are added up.
SPLITS = Splits(
    free="... width",
    arguments=("rows width", "..."),
    result="... width",
    residuals=("...", "rows none"),
)


def sum_by_row(
    values: jax.Array, at: jax.Array, rows: int, *, dtype: Any, interpret: bool = False
) -> jax.Array:
    """Add (T, width) values up by the row numbers `at` (T,), giving (rows, width)."""
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
        token = order_ref[jnp.minimum(place, end - 1)]  # the last token again past the end
        read = values_ref[token, part].astype(jnp.float32)
        return total + jnp.sum(jnp.where((place < end)[:, None], read, 0.0), axis=0)

    steps = (end - start + TOKENS - 1) // TOKENS
    total = jax.lax.fori_loop(0, steps, add, jnp.zeros((columns,), jnp.float32))
    out_ref[row, part] = total.astype(out_ref.dtype)


def _row_numbers(ids: jax.Array, rows: int) -> jax.Array:
    """Return the rows that jnp indexing reads: negative ids wrap, others are clipped."""
    return jnp.clip(jnp.where(ids < 0, ids + rows, ids), 0, rows - 1)
