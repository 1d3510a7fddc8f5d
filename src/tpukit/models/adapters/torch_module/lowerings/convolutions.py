"""Transposed convolutions, `fold` and pooling, with torch's rounding, borders and indices."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Sizes = int | Sequence[int]


def lowerings() -> dict[Any, Any]:
    """Return the lowerings of this file: torch's function -> its counterpart on arrays."""
    import torch
    import torch.nn.functional as functional

    found: dict[Any, Any] = {functional.fold: fold}
    for rank in (1, 2, 3):
        found[getattr(functional, f"conv_transpose{rank}d")] = transposed(rank)
        found[getattr(functional, f"max_pool{rank}d")] = largest(rank)
        found[getattr(torch, f"max_pool{rank}d")] = largest(rank)
        found[getattr(functional, f"max_pool{rank}d_with_indices")] = largest(rank, indices=True)
        found[getattr(functional, f"adaptive_max_pool{rank}d")] = adaptive_largest(rank)
        with_indices = getattr(functional, f"adaptive_max_pool{rank}d_with_indices")
        found[with_indices] = adaptive_largest(rank, indices=True)
        found[getattr(functional, f"avg_pool{rank}d")] = mean(rank)
        found[getattr(functional, f"max_unpool{rank}d")] = unpool(rank)
    return found


def for_each_axis(sizes: Sizes, rank: int) -> tuple[int, ...]:
    """Return one number per spatial axis; a single number applies to all axes."""
    given = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return given * rank if len(given) == 1 else given


def transposed(rank: int) -> Callable[..., jax.Array]:
    """Return the transposed convolution over `rank` spatial axes."""
    axes = "DHW"[-rank:]

    def lowering(
        input: jax.Array,
        weight: jax.Array,
        bias: jax.Array | None = None,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        dilation: Sizes = 1,
    ) -> jax.Array:
        steps, cut, more, spread = (
            for_each_axis(one, rank) for one in (stride, padding, output_padding, dilation)
        )
        batched = input if input.ndim == rank + 2 else input[None]
        # (in, out / groups, …) -> (in / groups, out, …), with groups concatenated in `out`.
        inside, outside = weight.shape[0] // groups, weight.shape[1] * groups
        kernel = weight.reshape(groups, inside, *weight.shape[1:]).swapaxes(0, 1)
        kernel = kernel.reshape(inside, outside, *weight.shape[2:])
        reach = [
            gap * (size - 1) - less
            for gap, size, less in zip(spread, weight.shape[2:], cut, strict=True)
        ]
        out = lax.conv_general_dilated(
            batched,
            jnp.flip(kernel, range(2, kernel.ndim)),
            window_strides=(1,) * rank,
            padding=[(one, one + extra) for one, extra in zip(reach, more, strict=True)],
            lhs_dilation=steps,
            rhs_dilation=spread,
            dimension_numbers=(f"NC{axes}", f"IO{axes}", f"NC{axes}"),
            feature_group_count=groups,
        )
        out = out if bias is None else out + bias.reshape(-1, *(1,) * rank)
        return out if input.ndim == rank + 2 else out[0]

    return lowering


def fold(
    input: jax.Array,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> jax.Array:
    """Return the sum of blocks at their places, the transpose of `unfold`."""
    size, kernel, spread, border, steps = (
        for_each_axis(one, 2) for one in (output_size, kernel_size, dilation, padding, stride)
    )
    blocks = input if input.ndim == 3 else input[None]
    channels = blocks.shape[1] // math.prod(kernel)

    def unfold(image: jax.Array) -> jax.Array:
        patches = lax.conv_general_dilated_patches(
            image,
            kernel,
            steps,
            [(one, one) for one in border],
            rhs_dilation=spread,
            precision=lax.Precision.HIGHEST,  # moving numbers must not round them
        )
        return patches.reshape(*patches.shape[:2], -1)

    image = jax.ShapeDtypeStruct((blocks.shape[0], channels, *size), blocks.dtype)
    (out,) = jax.linear_transpose(unfold, image)(blocks)
    return out if input.ndim == 3 else out[0]


# The positions of each output's window along an axis, and a mask of those inside the input.
Window = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def largest(rank: int, *, indices: bool = False) -> Callable[..., Any]:
    """Return max pooling."""

    def lowering(
        input: jax.Array,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
        return_indices: bool = indices,
    ) -> Any:
        kernel, border, spread = (
            for_each_axis(one, rank) for one in (kernel_size, padding, dilation)
        )
        steps = for_each_axis(stride, rank) if stride else kernel
        sizes = input.shape[-rank:]
        counts = [
            _outputs(*one, ceiling=ceil_mode)
            for one in zip(sizes, kernel, steps, border, spread, strict=True)
        ]
        if not return_indices and set(spread) == {1} and _is_float(input):
            return _reduced(input, lax.max, -jnp.inf, kernel, steps, border, counts)
        windows: list[Window] = []
        for size, length, step, before, gap, count in zip(
            sizes, kernel, steps, border, spread, counts, strict=True
        ):
            places = np.arange(count)[:, None] * step - before + np.arange(length) * gap
            windows.append((places, (places >= 0) & (places < size)))
        values, places = _pick_largest(input, windows)
        return (values, places) if return_indices else values

    return lowering


def adaptive_largest(rank: int, *, indices: bool = False) -> Callable[..., Any]:
    """Return adaptive max pooling."""

    def lowering(input: jax.Array, output_size: Any, return_indices: bool = indices) -> Any:
        wanted: Any = for_each_axis(output_size, rank)  # None keeps the size of the axis
        windows: list[Window] = []
        for size, asked in zip(input.shape[-rank:], wanted, strict=True):
            count = size if asked is None else asked
            starts = np.arange(count) * size // count
            ends = -(-(np.arange(count) + 1) * size // count)
            places = starts[:, None] + np.arange((ends - starts).max())
            windows.append((places, places < ends[:, None]))
        values, places = _pick_largest(input, windows)
        return (values, places) if return_indices else values

    return lowering


def mean(rank: int) -> Callable[..., jax.Array]:
    """Return mean pooling."""

    def lowering(
        input: jax.Array,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> jax.Array:
        kernel, border = (for_each_axis(one, rank) for one in (kernel_size, padding))
        steps = for_each_axis(stride, rank) if stride else kernel
        divisor, counts = np.ones(()), []
        for size, length, step, before in zip(
            input.shape[-rank:], kernel, steps, border, strict=True
        ):
            count = _outputs(size, length, step, before, 1, ceiling=ceil_mode)
            starts = np.arange(count) * step - before
            ends = np.minimum(starts + length, size + before)
            if not count_include_pad:
                starts, ends = np.maximum(starts, 0), np.minimum(ends, size)
            divisor = divisor[..., None] * (ends - starts)
            counts.append(count)
        total = _reduced(input, lax.add, 0.0, kernel, steps, border, counts)
        return total / jnp.asarray(divisor_override or divisor, input.dtype)

    return lowering


def unpool(rank: int) -> Callable[..., jax.Array]:
    """Return max unpooling: values at their indices, zeros elsewhere."""

    def lowering(
        input: jax.Array,
        indices: jax.Array,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        output_size: Any = None,
    ) -> jax.Array:
        kernel, border = (for_each_axis(one, rank) for one in (kernel_size, padding))
        steps = for_each_axis(stride, rank) if stride else kernel
        least = [
            (count - 1) * step + length - 2 * before
            for count, step, length, before in zip(
                input.shape[-rank:], steps, kernel, border, strict=True
            )
        ]
        sizes = tuple(least if output_size is None else output_size)[-rank:]
        leading = input.shape[:-rank]
        planes = jnp.zeros((math.prod(leading), math.prod(sizes)), input.dtype)
        rows = jnp.arange(planes.shape[0])[:, None]
        flat = [one.reshape(planes.shape[0], -1) for one in (indices, input)]
        return planes.at[rows, flat[0]].set(flat[1]).reshape(*leading, *sizes)

    return lowering


def _is_float(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _outputs(size: int, length: int, step: int, before: int, gap: int, *, ceiling: bool) -> int:
    """Return the number of windows of an axis; with `ceiling` the last may exceed the input."""
    room = size + 2 * before - gap * (length - 1) - 1
    count = (-(-room // step) if ceiling else room // step) + 1
    return count - 1 if ceiling and (count - 1) * step >= size + before else count


def _reduced(
    input: jax.Array, by: Any, start: float, kernel: Any, steps: Any, border: Any, counts: list[int]
) -> jax.Array:
    """Reduce windows, with padding at the end up to the last window."""
    ones = (1,) * (input.ndim - len(kernel))
    after = [
        max(0, (count - 1) * step + length - size - before)
        for count, step, length, size, before in zip(
            counts, steps, kernel, input.shape[len(ones) :], border, strict=True
        )
    ]
    padding = [*((0, 0) for _ in ones), *zip(border, after, strict=True)]
    return lax.reduce_window(
        input, np.asarray(start, input.dtype), by, (*ones, *kernel), (*ones, *steps), padding
    )


def _pick_largest(input: jax.Array, windows: list[Window]) -> tuple[jax.Array, jax.Array]:
    """Return the first largest value of each window, and its index in the plane."""
    sizes, rank = input.shape[-len(windows) :], len(windows)
    place, counts = np.zeros((), np.int32), np.ones((), bool)
    for axis, ((places, inside), size) in enumerate(zip(windows, sizes, strict=True)):
        shape = [1] * (2 * rank)
        shape[axis], shape[rank + axis] = places.shape
        inner = np.clip(places, 0, size - 1).reshape(shape)
        place, counts = place * size + inner, counts & inside.reshape(shape)
    outputs = place.shape[:rank]
    flat_place, flat_counts = (one.reshape(*outputs, -1) for one in (place, counts))
    least = -jnp.inf if _is_float(input) else jnp.iinfo(input.dtype).min
    taken = input.reshape(*input.shape[:-rank], -1)[..., flat_place]
    best = jnp.argmax(jnp.where(flat_counts, taken, least), -1, keepdims=True)
    values = jnp.take_along_axis(taken, best, axis=-1)[..., 0]
    spots = jnp.broadcast_to(jnp.asarray(flat_place, jnp.int32), taken.shape)
    return values, jnp.take_along_axis(spots, best, axis=-1)[..., 0]
