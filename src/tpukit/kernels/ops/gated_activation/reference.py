"""silu(gate) * value in plain jnp, with the residuals that all implementations share."""

from typing import Any

import jax
import jax.numpy as jnp


def gated_activation(both: jax.Array) -> jax.Array:
    """silu(gate) * value, where `both` is gate and value side by side on the last axis."""
    gate, value = jnp.split(both, 2, axis=-1)
    return jax.nn.silu(gate) * value


def forward(both: jax.Array) -> tuple[jax.Array, Any]:
    """The product; its gradient needs both factors."""
    return gated_activation(both), both


def backward(both: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    """The gradient of gate and value side by side, computed in float32."""
    gate, value = jnp.split(both, 2, axis=-1)
    return (jnp.concatenate(gradients(gate, value, cotangent), axis=-1).astype(both.dtype),)


def gradients(
    gate: jax.Array, value: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of gate and value in the wide type, for the kernel as well."""
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    gate, value, cotangent = (x.astype(wide) for x in (gate, value, cotangent))
    share = jax.nn.sigmoid(gate)
    d_value = cotangent * gate * share
    return cotangent * value * share * (1 + gate * (1 - share)), d_value
