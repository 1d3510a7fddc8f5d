"""Rounding arrays to narrow formats: scales by the largest magnitude, nearest values, and back.

Products, quantized weights, precision modes and eight-bit moments all round with these.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..hardware.formats import NumberFormat

Axes = int | tuple[int, ...] | None


def absmax_scales(
    x: jax.Array, format: NumberFormat, *, axis: Axes = None, of_zeros: float = 1.0
) -> jax.Array:
    """Scales by which the largest magnitude along `axis` becomes the largest value of a format.

    Args:
        x: At least float32, for the scales to be exact.
        format: What will be rounded to.
        axis: What shares a scale; those axes stay, of size 1. None is everything, and a scalar.
        of_zeros: The scale where there is nothing but zeros. 1 can be divided by; 0 leaves out of
            a sum what is multiplied with it.
    """
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=axis is not None, initial=0.0)
    scales = largest / format.largest
    return scales if of_zeros == 0 else jnp.where(scales == 0, of_zeros, scales)


def to_nearest(scaled: jax.Array, format: NumberFormat) -> jax.Array:
    """The nearest values of a format, ties to even, of numbers within its range."""
    whole = jnp.round(scaled) if format.kind in ("integer", "unsigned") else scaled
    return whole.astype(format.name)


def quantize(
    x: jax.Array, format: NumberFormat, *, axis: Axes = None
) -> tuple[jax.Array, jax.Array]:
    """Values of a format and float32 scales, by the largest magnitude along `axis`."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scales = absmax_scales(wide, format, axis=axis)
    return to_nearest(wide / scales, format), scales.astype(jnp.float32)


def round_to_bound(x: jax.Array, format: NumberFormat, bound: float) -> jax.Array:
    """Values of a format under one fixed scale, by which `bound` becomes its largest value.

    What lies outside the bound becomes the largest value; the scale is `bound / format.largest`.
    """
    scaled = x / jnp.asarray(bound / format.largest, x.dtype)
    return to_nearest(jnp.clip(scaled, -format.largest, format.largest), format)


def quantize_channels(
    x: jax.Array, format: NumberFormat, *, axis: Axes
) -> tuple[jax.Array, jax.Array]:
    """Values of a format and scales by the largest magnitude along `axis`, all in the dtype of x.

    `quantize` computes in float32. This follows qwix to the bit, so that training in eight bits
    has the numbers of the published runs: scales as narrow as `x`, the quotient rounded to that
    dtype first, and no scale for magnitudes near the smallest float.
    """
    scales = absmax_scales(x, format, axis=axis, of_zeros=0.0)
    smallest = jnp.sqrt(jnp.finfo(x.dtype).tiny)
    scales = jnp.where(scales < smallest, jnp.ones_like(scales), scales)
    # A scale rounded down takes the largest value past the format's.
    scaled = jnp.clip(x / scales, -format.largest, format.largest)
    return to_nearest(scaled, format), scales


def decode(values: jax.Array, scales: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """What values stand for, times their scales, which are broadcast."""
    return values.astype(dtype) * scales.astype(dtype)


def is_rounded_up(
    x: jax.Array, lower: jax.Array, upper: jax.Array, thresholds: jax.Array
) -> jax.Array:
    """Whether stochastic rounding takes the upper of two neighbours: as often as x is near it.

    Args:
        x: Between both.
        lower: The neighbour below.
        upper: The neighbour above.
        thresholds: In [0, 1): uniform, random or evenly spread, for x to be right on average.
    """
    return (x - lower) / (upper - lower) > thresholds
