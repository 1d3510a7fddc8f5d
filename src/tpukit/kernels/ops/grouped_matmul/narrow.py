"""The products of a grouped matmul one by one, of operands in eight bits and results that are wide.

`grouped_matmul` has a gradient and one dtype throughout. In eight bits the gradient's operands are
of other formats than the forward pass's, and whoever rounded them knows their scales: these three
multiply what they are given and differentiate nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import RaggedDotDimensionNumbers

from ...registry.dispatch import dispatch
from ...registry.op import PALLAS_TPU, XLA
from .pallas_tpu import OP_NAME, grouped_product, grouped_sum

_SUM_OVER_ROWS = RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def multiply_groups(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    dtype: Any,
    transposed: bool = False,
    factor: float = 1.0,
    implementation: str | None = None,
    expected_rows: int | None = None,
) -> jax.Array:
    """Rows (M, C), sorted by group, each times the weight of its group; summed in float32.

    Args:
        rows: In one eight-bit format; those past the last group give zeros.
        weights: (G, C, N), or (G, N, C) with `transposed`, in the same format or another.
        group_sizes: (G,) integers.
        dtype: Of the result, (M, N).
        transposed: Whether weights are multiplied transposed, for the gradient of rows.
        factor: Multiplies the result before it is rounded to `dtype`.
        implementation: "pallas_tpu" or "xla"; None takes the kernel on TPU.
        expected_rows: As for `grouped_matmul`.
    """
    options = {"dtype": dtype, "transposed": transposed, "factor": factor}
    return _chosen(
        {PALLAS_TPU: grouped_product, XLA: _multiply_xla},
        (rows, weights, group_sizes),
        options,
        implementation,
        expected_rows,
    )


def sum_groups(
    rows: jax.Array,
    others: jax.Array,
    group_sizes: jax.Array,
    scales: jax.Array,
    *,
    dtype: Any,
    implementation: str | None = None,
    expected_rows: int | None = None,
) -> jax.Array:
    """The transposed rows (M, K) times others (M, N), summed by group in float32: (G, K, N).

    Columns are rounded to `dtype` and multiplied by `scales` (1, N) in float32, where they are
    made: a pass of its own over the gradients of all experts would read and write them once more.
    """
    return _chosen(
        {PALLAS_TPU: grouped_sum, XLA: _sum_xla},
        (rows, others, group_sizes, scales),
        {"dtype": dtype},
        implementation,
        expected_rows,
    )


def _chosen(
    functions: dict[str, Any],
    arrays: tuple[jax.Array, ...],
    options: dict[str, Any],
    implementation: str | None,
    expected_rows: int | None,
) -> jax.Array:
    return dispatch(
        *(OP_NAME, functions, *arrays),
        implementation=implementation,
        on_gpu=XLA,
        elsewhere=XLA,
        options=options,
        pallas_options={"expected_rows": expected_rows},
    )


def _multiply_xla(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    dtype: Any,
    transposed: bool,
    factor: float,
) -> jax.Array:
    matrices = weights.swapaxes(1, 2) if transposed else weights
    product = jax.lax.ragged_dot(rows, matrices, group_sizes, preferred_element_type=jnp.float32)
    # Rows past the last group may be anything after a ragged product.
    return jnp.where(_counted(rows, group_sizes), product * factor, 0).astype(dtype)


def _sum_xla(
    rows: jax.Array, others: jax.Array, group_sizes: jax.Array, scales: jax.Array, *, dtype: Any
) -> jax.Array:
    counted = _counted(rows, group_sizes)
    left, right = (jnp.where(counted, one, jnp.zeros_like(one)) for one in (rows, others))
    summed = jax.lax.ragged_dot_general(
        left, right, group_sizes, _SUM_OVER_ROWS, preferred_element_type=jnp.float32
    )
    return (summed.astype(dtype) * scales).astype(dtype)


def _counted(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return jnp.arange(rows.shape[0])[:, None] < group_sizes.sum()
