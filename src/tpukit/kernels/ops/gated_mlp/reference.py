"""The gated feed-forward block in plain jnp."""

import jax

from .activations import get_activation


def gated_mlp(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    activation: str = "silu",
) -> jax.Array:
    """`(act(x @ w_gate) * (x @ w_up)) @ w_down`."""
    return (get_activation(activation)(x @ w_gate) * (x @ w_up)) @ w_down
