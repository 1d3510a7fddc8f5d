"""Rounding to narrow formats: scales by the largest magnitude, nearest values, and back.

Matmuls, quantized weights, precision modes and 8-bit moments all round with these functions.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..hardware.formats import NumberFormat

Axes = int | tuple[int, ...] | None


def absmax_scales(
    x: jax.Array, format: NumberFormat, *, axis: Axes = None, of_zeros: float = 1.0
) -> jax.Array:
    """Return the scales that map the largest magnitude along `axis` to a format's largest value.

    Args:
        x: At least float32, for the scales to be exact.
        format: The format to round to.
        axis: Axes that share a scale; they stay, with size 1. None is all axes, and a scalar scale.
        of_zeros: The scale where all values are zero: 1 can be divided by, 0 removes products with
            it from a sum.
    """
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=axis is not None, initial=0.0)
    scales = largest / format.largest
    return scales if of_zeros == 0 else jnp.where(scales == 0, of_zeros, scales)


def to_nearest(scaled: jax.Array, format: NumberFormat) -> jax.Array:
    """Return the nearest values of a format, ties to even, for numbers within its range."""
    rounded = jnp.round(scaled) if format.kind in ("integer", "unsigned") else scaled
    return rounded.astype(format.container)


def quantize(
    x: jax.Array, format: NumberFormat, *, axis: Axes = None
) -> tuple[jax.Array, jax.Array]:
    """Return values of a format and float32 scales, by the largest magnitude along `axis`."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scales = absmax_scales(wide, format, axis=axis)
    return to_nearest(wide / scales, format), scales.astype(jnp.float32)


def round_to_bound(x: jax.Array, format: NumberFormat, bound: float) -> jax.Array:
    """Return values of a format under one fixed scale, which maps `bound` to its largest value.

    Values outside the bound are clipped; the scale is `bound / format.largest`.
    """
    scaled = x / jnp.asarray(bound / format.largest, x.dtype)
    return to_nearest(jnp.clip(scaled, -format.largest, format.largest), format)


def quantize_channels(
    x: jax.Array, format: NumberFormat, *, axis: Axes
) -> tuple[jax.Array, jax.Array]:
    """Return values and scales by the largest magnitude along `axis`, in the dtype of x.

    `quantize` computes in float32. This follows qwix to the bit, so that 8-bit training has the
    numbers of the published runs: scales as narrow as `x`, the quotient rounded to that dtype
    first, and a scale of 1 for magnitudes near the smallest float.
    """
    scales = absmax_scales(x, format, axis=axis, of_zeros=0.0)
    smallest = jnp.sqrt(jnp.finfo(x.dtype).tiny)
    scales = jnp.where(scales < smallest, jnp.ones_like(scales), scales)
    # A scale that was rounded down would map the largest magnitude past the format's largest value.
    scaled = jnp.clip(x / scales, -format.largest, format.largest)
    return to_nearest(scaled, format), scales


def decode(values: jax.Array, scales: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Return the numbers that values represent: values times their scales, which are broadcast."""
    return values.astype(dtype) * scales.astype(dtype)


def is_rounded_up(
    x: jax.Array, lower: jax.Array, upper: jax.Array, thresholds: jax.Array
) -> jax.Array:
    """Whether stochastic rounding takes the upper neighbour, with a probability by the distance.

    Args:
        x: A number between both neighbours.
        lower: The neighbour below.
        upper: The neighbour above.
        thresholds: In [0, 1): uniform, random or evenly spread, for the mean to be exact.
    """
    return (x - lower) / (upper - lower) > thresholds
