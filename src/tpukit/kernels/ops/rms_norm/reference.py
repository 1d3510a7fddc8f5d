"""RMS norm in plain jnp: what the kernel is judged by, and what runs where XLA is best."""

import jax
import jax.numpy as jnp


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    eps: float = 1e-6,
) -> jax.Array:
    """Normalise the last axis to mean square 1, in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if scale is not None:
        wide = wide * scale
    return wide.astype(x.dtype)
