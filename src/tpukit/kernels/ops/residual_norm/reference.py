"""The residual norm in plain jnp, with the residuals that all implementations share."""

from typing import Any

import jax

from ..rms_norm import reference as rms


def forward(
    x: jax.Array, delta: jax.Array | None, scale: jax.Array, *, eps: float
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """The new stream and its norm; what the backward pass needs is the stream and the scale."""
    stream = x if delta is None else x + delta
    return (stream, rms.rms_norm(stream, scale, eps=eps)), (stream, scale)


def backward(
    residuals: tuple[jax.Array, jax.Array], cotangent: tuple[jax.Array, jax.Array], *, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the stream, of what was added to it, and of the scale."""
    d_stream, d_normed = cotangent
    _, pull = jax.vjp(lambda x, scale: rms.rms_norm(x, scale, eps=eps), *residuals)
    d_x, d_scale = pull(d_normed)
    total = d_stream + d_x
    return total, total, d_scale
