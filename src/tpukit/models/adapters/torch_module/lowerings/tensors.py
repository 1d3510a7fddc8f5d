"""Attention, embeddings, and single functions of tensors that torchax lacks or gets wrong."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .....errors import TPUModelError
from .....hardware.target import on_one_gpu
from .....kernels.ops.embedding_rows import embedding_rows
from .....kernels.ops.flash_attention.api import flash_attention
from .....parallel.sharding.activations import constrain
from ..environment import next_key


def lowerings() -> dict[Any, Any]:
    """Return the lowerings of this file: torch's function -> its counterpart on arrays."""
    import torch
    import torch.nn.functional as functional

    aten: Any = torch.ops.aten
    return {
        torch.take_along_dim: take_along,
        torch.Tensor.take_along_dim: take_along,
        aten.mT: lambda input: input.mT,
        torch.pdist: pairwise_distances,
        functional.rrelu: randomly_leaky,
        functional.scaled_dot_product_attention: attention,
        functional.embedding: embedding,
        functional.embedding_bag: embedding_bag,
        aten._upsample_bilinear2d_aa.default: _resized("linear"),
        aten._upsample_bicubic2d_aa.default: _resized("cubic"),
    }


def take_along(input: jax.Array, indices: jax.Array, dim: int | None = None) -> jax.Array:
    """Return values along an axis; unlike torch it accepts 32-bit indices."""
    return jnp.take_along_axis(input, indices, axis=dim)


def pairwise_distances(input: jax.Array, p: float = 2.0) -> jax.Array:
    """Return the distance of every row to every later one."""
    rows, others = np.triu_indices(input.shape[0], 1)
    apart = jnp.abs(input[rows] - input[others])
    if p == 2:
        square = (apart**2).sum(-1)
        # The square root has no gradient at equal rows, where torch returns zero.
        return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
    if p == np.inf:
        return apart.max(-1)
    if p == 1:
        return apart.sum(-1)
    raise NotImplementedError(f"pdist with p={p}; expected 1, 2 or infinity.")


def randomly_leaky(
    input: jax.Array,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> jax.Array:
    """Return torch's `rrelu`: a random slope for negative numbers, its mean in eval mode."""
    if inplace:
        raise NotImplementedError("rrelu in place; use inplace=False.")
    slope: Any = (lower + upper) / 2
    if training:
        slope = jax.random.uniform(next_key(), input.shape, input.dtype, lower, upper)
    return jnp.where(input >= 0, input, slope * input)


def _resized(method: str) -> Any:
    """Return antialiased image resizing."""

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


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """Return torch's `scaled_dot_product_attention`, by our kernel where possible."""
    boolean = attn_mask is None or attn_mask.dtype == jnp.bool_
    same_width = query.shape[-1] == value.shape[-1]
    kinds = query.dtype == key.dtype == value.dtype
    if query.ndim == 4 and boolean and same_width and kinds and not dropout_p:
        mask = None if attn_mask is None else _four_dimensions(attn_mask)
        return flash_attention(
            query, key, value, causal=is_causal, mask=mask, scale=scale, layout="BHSD"
        )
    groups = query.shape[-3] // key.shape[-3] if enable_gqa and query.ndim > 2 else 1
    if groups > 1:
        key, value = (jnp.repeat(one, groups, axis=-3) for one in (key, value))
    wide = jnp.promote_types(query.dtype, jnp.float32)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum("...qd,...kd->...qk", query, key, preferred_element_type=wide) * factor
    allowed: Any = True
    if is_causal:
        allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if attn_mask is not None and attn_mask.dtype == jnp.bool_:
        allowed = allowed & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    if allowed is not True:
        scores = jnp.where(allowed, scores, -jnp.inf)
    # A query that attends to nothing has the output zero instead of NaN.
    empty = jnp.all(jnp.isneginf(scores), -1, keepdims=True)
    shares = jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, scores), axis=-1))
    if dropout_p:
        kept = jax.random.bernoulli(next_key(), 1 - dropout_p, shares.shape)
        shares = jnp.where(kept, shares / (1 - dropout_p), 0)
    return jnp.einsum("...qk,...kd->...qd", shares.astype(value.dtype), value)


def _four_dimensions(mask: jax.Array) -> jax.Array:
    """Return a mask of fewer dimensions with leading ones."""
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def embedding(
    input: jax.Array,
    weight: jax.Array,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    """Take rows of a table.

    Raises:
        TPUModelError: `max_norm` is set, which changes the table.
    """
    del norm_type, sparse
    if max_norm is not None:
        raise TPUModelError(
            "an embedding with max_norm changes its table in its forward, which is not supported; "
            "normalise the rows after the lookup instead."
        )
    # On a mesh the table is gathered, as every weight is before use, and activations stay in place.
    table = constrain(weight, "vocab", None)
    rows = embedding_rows(table, input) if on_one_gpu() else table[input]
    if scale_grad_by_freq:
        times = jnp.bincount(input.reshape(-1), length=weight.shape[0])[input]
        fixed = jax.lax.stop_gradient(rows)
        rows = fixed + (rows - fixed) / times[..., None]
    if padding_idx is not None:
        padding = (input == padding_idx % weight.shape[0])[..., None]
        rows = jnp.where(padding, jax.lax.stop_gradient(rows), rows)
    return rows


def embedding_bag(
    input: jax.Array,
    weight: jax.Array,
    offsets: jax.Array | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: Literal["sum", "mean", "max"] = "mean",
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> jax.Array:
    """Return the reduced rows of each bag; bags are rows of `input`, or start at `offsets`."""
    rows = embedding(
        input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    ).reshape(-1, weight.shape[1])
    if offsets is None:
        bags = input.shape[0]
        bag = jnp.repeat(jnp.arange(bags), input.shape[1])
    else:
        bags = offsets.shape[0] - include_last_offset
        places = jnp.arange(input.shape[0])
        bag = jnp.searchsorted(offsets[:bags], places, side="right") - 1
    counted = jnp.ones(input.size, bool)
    if padding_idx is not None:
        counted = input.reshape(-1) != padding_idx % weight.shape[0]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    if mode == "max":
        kept = jnp.where(counted[:, None], rows, -jnp.inf)
        largest = jax.ops.segment_max(kept, bag, bags)
        return jnp.where(jnp.isneginf(largest), 0, largest)
    total = jax.ops.segment_sum(jnp.where(counted[:, None], rows, 0), bag, bags)
    if mode == "sum":
        return total
    number = jax.ops.segment_sum(counted.astype(rows.dtype), bag, bags)
    return total / jnp.maximum(number, 1)[:, None]
