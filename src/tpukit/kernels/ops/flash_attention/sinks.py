"""Attention sinks: a learned score of each query head that takes a share of the softmax.

A sink is one more key, whose value is zero: it joins the sum of the weights, and nothing else. So
it can be added to a result whose log-sum-exp is known, and its gradient needs no scores.
"""

import jax
import jax.numpy as jnp


def add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The result (B, S, H, Dv) and log-sum-exp (B, H, S) of attention, with sinks (H,)."""
    with_sinks = jnp.logaddexp(lse, sinks.astype(lse.dtype)[:, None])
    share = jnp.moveaxis(jnp.exp(lse - with_sinks), 1, 2)[..., None]
    return (out * share).astype(out.dtype), with_sinks


def sink_gradient(sinks: jax.Array, lse: jax.Array, dots: jax.Array) -> jax.Array:
    """The gradient of sinks (H,).

    Args:
        sinks: Scores of the sinks.
        lse: (B, H, S) log-sum-exp of each row, with the sink.
        dots: (B, S, H) the dot product of each row of the result with its cotangent.
    """
    weights = jnp.exp(sinks.astype(lse.dtype)[:, None] - lse)
    return -jnp.einsum("bhs,bsh->h", weights, dots.astype(lse.dtype)).astype(sinks.dtype)
