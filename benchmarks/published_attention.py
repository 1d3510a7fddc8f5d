"""Attention as MaxText's plain kind computes it, which published runs without a kernel used."""

import jax
import jax.numpy as jnp


def narrow_scores(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Causal attention whose scores are rounded to the activations' format before the softmax.

    As `dot_product_attention` of AI-Hypercomputer/maxtext@28816574b (MaxText/layers/attentions.py)
    does without float32_logits, which is its default: half the bytes of scores in float32.
    """
    if window is not None or segment_ids is not None:
        raise ValueError("published runs with plain attention have neither windows nor segments")
    repeats = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k).astype(jnp.float32)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
    shares = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", shares.astype(v.dtype), v)
