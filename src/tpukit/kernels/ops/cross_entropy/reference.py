"""Cross-entropy by whole logits: what every other path is measured against."""

import jax
import jax.numpy as jnp

from .terms import CrossEntropy, LossTerms, Reduction, reduce_losses


def cross_entropy_reference(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: Reduction = "mean",
) -> CrossEntropy:
    """See `cross_entropy`; holds all logits (T, V) in float32 or wider."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.dot(x, w, preferred_element_type=wide)
    losses, log_normaliser = LossTerms(z_loss, soft_cap).of_logits(logits, labels)
    loss = reduce_losses(losses, weights.astype(losses.dtype), reduction)
    return CrossEntropy(loss, jax.lax.stop_gradient(log_normaliser))
