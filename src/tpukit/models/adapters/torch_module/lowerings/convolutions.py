"""Convolutions that torchax gets wrong: transposed ones of several groups, and `fold`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Sizes = int | Sequence[int]


def lowerings() -> dict[Any, Any]:
    """Return what is lowered here: torch's function -> its counterpart on arrays."""
    import torch.nn.functional as functional

    return {
        functional.conv_transpose1d: transposed(1),
        functional.conv_transpose2d: transposed(2),
        functional.conv_transpose3d: transposed(3),
        functional.fold: fold,
    }


def for_each_axis(sizes: Sizes, rank: int) -> tuple[int, ...]:
    """Return one number for each spatial axis; torch takes a single one for all of them."""
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
        # (in, out / groups, …) -> (in / groups, out, …): the groups lie side by side in `out`.
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
    """Add up blocks where they came from: the transpose of taking them."""
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
            precision=lax.Precision.HIGHEST,  # it moves numbers, and must not round them
        )
        return patches.reshape(*patches.shape[:2], -1)

    image = jax.ShapeDtypeStruct((blocks.shape[0], channels, *size), blocks.dtype)
    (out,) = jax.linear_transpose(unfold, image)(blocks)
    return out if input.ndim == 3 else out[0]
