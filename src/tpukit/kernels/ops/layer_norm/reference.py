"""Layer norm in plain jnp: what the kernel is judged by, and what runs where XLA is best."""

import jax
import jax.numpy as jnp


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-5,
) -> jax.Array:
    """Normalise the last axis to mean 0 and variance 1, in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if scale is not None:
        wide = wide * scale
    if bias is not None:
        wide = wide + bias
    return wide.astype(x.dtype)
