"""Single functions of tensors that torchax lacks, or whose gradients it gets wrong."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..randomness import next_key


def lowerings() -> dict[Any, Any]:
    """Return what is lowered here: torch's function -> its counterpart on arrays."""
    import torch
    import torch.nn.functional as functional

    aten: Any = torch.ops.aten
    return {
        torch.take_along_dim: take_along,
        torch.Tensor.take_along_dim: take_along,
        aten.mT: lambda input: input.mT,
        torch.pdist: pairwise_distances,
        functional.rrelu: randomly_leaky,
        aten._upsample_bilinear2d_aa.default: _resized("linear"),
        aten._upsample_bicubic2d_aa.default: _resized("cubic"),
    }


def take_along(input: jax.Array, indices: jax.Array, dim: int | None = None) -> jax.Array:
    """Take values along an axis; torch wants 64-bit indices for it, which there are none of."""
    return jnp.take_along_axis(input, indices, axis=dim)


def pairwise_distances(input: jax.Array, p: float = 2.0) -> jax.Array:
    """Return the distance of every row to every later one."""
    rows, others = np.triu_indices(input.shape[0], 1)
    apart = jnp.abs(input[rows] - input[others])
    if p == 2:
        square = (apart**2).sum(-1)
        # Equal rows are where the root has no gradient; torch gives none there.
        return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
    if p == np.inf:
        return apart.max(-1)
    if p == 1:
        return apart.sum(-1)
    raise NotImplementedError(f"pdist with p={p}; there are 1, 2 and infinity.")


def randomly_leaky(
    input: jax.Array,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> jax.Array:
    """Let negative numbers through at a random slope, in eval mode at its mean."""
    if inplace:
        raise NotImplementedError("rrelu in place; use inplace=False.")
    slope: Any = (lower + upper) / 2
    if training:
        slope = jax.random.uniform(next_key(), input.shape, input.dtype, lower, upper)
    return jnp.where(input >= 0, input, slope * input)


def _resized(method: str) -> Any:
    """Return the resizing of pictures that averages where it shrinks."""

    def lowering(
        input: jax.Array,
        output_size: Any,
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> jax.Array:
        if align_corners:
            raise NotImplementedError("antialiased resizing with align_corners=True.")
        stated = (scales_h, scales_w)
        ratios = [new / old for new, old in zip(output_size, input.shape[-2:], strict=True)]
        scale = [ratio if one is None else one for one, ratio in zip(stated, ratios, strict=True)]
        return jax.image.scale_and_translate(
            input,
            (*input.shape[:-2], *output_size),
            (input.ndim - 2, input.ndim - 1),
            jnp.asarray(scale, jnp.float32),
            jnp.zeros(2, jnp.float32),
            method,
            antialias=True,
        )

    return lowering
