"""Grouped matmuls of experts in 8-bit floats, as in published TPU runs.

As `tpukit.models.matmul.eight_bit` does for one matrix: rows and weights in e4m3 with one
constant scale, or with scales by row and by column; gradients in e5m2, by row for the gradient of
rows and by column for that of weights; the values of the forward pass are reused. A column's scale
is shared by all experts, so it can be folded into a gradient whose rows are of any expert. The
numbers are those of qwix's `ragged_dot_qt`, which like the published runs masks nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...hardware.formats import FLOAT8_E4M3FN, FLOAT8_E5M2
from ...kernels.ops.grouped_matmul.api import multiply_groups, sum_groups
from ...kernels.rounding import quantize_channels, round_to_bound

Residuals = tuple[Array, Array, Array, Array, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Float8Weight:
    """The weights of all experts in e4m3, rounded where they are stored and gathered narrow.

    Attributes:
        values: (E, K, N) in e4m3.
        wide: The unrounded weight, only to receive its gradient. Its values are never read or
            gathered.
    """

    values: Array
    wide: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.values.shape


def round_weight(weight: Array, bound: float) -> Float8Weight:
    """Round a weight (E, K, N) to e4m3 with a constant scale for magnitudes up to `bound`."""
    return Float8Weight(round_to_bound(lax.stop_gradient(weight), FLOAT8_E4M3FN, bound), weight)


def grouped_matmul_float8(
    rows: Array,
    weight: Array | Float8Weight,
    group_sizes: Array,
    *,
    bound: float | None,
    implementation: str | None = None,
    expected_rows: int | None = None,
) -> Array:
    """Return `grouped_matmul` of rows (M, K) and weights (G, K, N), both rounded to 8 bits.

    Args:
        rows: Sorted by group.
        weight: (G, K, N), one matrix per group.
        group_sizes: (G,) integers; rows past their sum give zeros.
        bound: The largest magnitude of one constant scale, with which the weight may be rounded
            already; None gives each row and each column a scale by its largest magnitude.
        implementation: As for `grouped_matmul`.
        expected_rows: As for `grouped_matmul`.
    """
    if isinstance(weight, Float8Weight):
        wide, values = weight.wide, weight.values
        scales = jnp.full((1, 1, 1), _scale(bound), rows.dtype)
    else:
        wide = weight
        values, scales = _rounded(lax.stop_gradient(weight), bound, axis=(0, 1))
    kernel = _Kernel(implementation, expected_rows)
    return _product(rows, wide, values, scales.reshape(1, -1), group_sizes, bound, kernel)


class _Kernel(NamedTuple):
    """The implementation of the three matmuls."""

    implementation: str | None
    expected_rows: int | None

    @property
    def multiply(self) -> Callable[..., Array]:
        """Call `multiply_groups` with this implementation."""
        return partial(multiply_groups, **self._asdict())

    @property
    def sum(self) -> Callable[..., Array]:
        """Call `sum_groups` with this implementation."""
        return partial(sum_groups, **self._asdict())


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _product(
    rows: Array,
    wide: Array,
    values: Array,
    scales: Array,
    sizes: Array,
    bound: float | None,
    kernel: _Kernel,
) -> Array:
    return _forward(rows, wide, values, scales, sizes, bound, kernel)[0]


def _forward(
    rows: Array,
    wide: Array,
    values: Array,
    scales: Array,
    sizes: Array,
    bound: float | None,
    kernel: _Kernel,
) -> tuple[Array, Residuals]:
    del wide
    left, left_scales = _rounded(rows, bound, axis=1)
    kept = (left, left_scales, values, scales, sizes)
    if bound is not None:  # both scales are this constant, by which the kernel multiplies
        factor = _scale(bound) ** 2
        return kernel.multiply(left, values, sizes, dtype=rows.dtype, factor=factor), kept
    y = kernel.multiply(left, values, sizes, dtype=rows.dtype)
    return y * left_scales * scales, kept


def _backward(
    bound: float | None, kernel: _Kernel, kept: Residuals, gradient: Array
) -> tuple[Array, Array, None, None, None]:
    del bound
    left, left_scales, values, scales, sizes = kept
    dtype = gradient.dtype
    # The scale of a contracted dimension can only be applied to the other operand, which is rounded
    # anyway.
    by_row, row_scales = quantize_channels(gradient * scales, FLOAT8_E5M2, axis=1)
    d_rows = kernel.multiply(by_row, values, sizes, dtype=dtype, transposed=True) * row_scales
    by_column, column_scales = quantize_channels(gradient * left_scales, FLOAT8_E5M2, axis=0)
    d_weight = kernel.sum(left, by_column, sizes, column_scales.astype(jnp.float32), dtype=dtype)
    return d_rows, d_weight, None, None, None


_product.defvjp(_forward, _backward)


def _rounded(
    operand: Array, bound: float | None, *, axis: int | tuple[int, ...]
) -> tuple[Array, Array]:
    if bound is None:
        return quantize_channels(operand, FLOAT8_E4M3FN, axis=axis)
    scale = jnp.full((1,) * operand.ndim, _scale(bound), operand.dtype)
    return round_to_bound(operand, FLOAT8_E4M3FN, bound), scale


def _scale(bound: float | None) -> float:
    assert bound is not None, "a weight that is rounded already has a constant scale"
    return bound / FLOAT8_E4M3FN.largest
