"""A gated feed-forward layer with its gradient: `tpukit compile examples/layer.py:...`."""

import jax
import jax.numpy as jnp


def forward_and_backward(up: jax.Array, down: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients of one layer's mean square with respect to both weights."""

    def loss(up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(x @ up)
        return jnp.mean(jnp.square((hidden @ down).astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1))(up, down)
