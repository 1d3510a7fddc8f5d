"""Attention, by our kernel where it can."""

from typing import Any

import jax
import jax.numpy as jnp

from .....kernels.ops.flash_attention.api import flash_attention
from ..randomness import next_key


def lowerings() -> dict[Any, Any]:
    """Return what is lowered here: torch's function -> its counterpart on arrays."""
    import torch.nn.functional as functional

    return {functional.scaled_dot_product_attention: attention}


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
    """Attend as `scaled_dot_product_attention` does, by our kernel where it can."""
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
    # A query that may attend to nothing gives zeros, not NaN.
    empty = jnp.all(jnp.isneginf(scores), -1, keepdims=True)
    shares = jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, scores), axis=-1))
    if dropout_p:
        kept = jax.random.bernoulli(next_key(), 1 - dropout_p, shares.shape)
        shares = jnp.where(kept, shares / (1 - dropout_p), 0)
    return jnp.einsum("...qk,...kd->...qd", shares.astype(value.dtype), value)


def _four_dimensions(mask: jax.Array) -> jax.Array:
    """Return a mask of fewer dimensions with leading ones."""
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
