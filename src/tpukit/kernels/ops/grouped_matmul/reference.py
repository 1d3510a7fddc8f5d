"""The grouped matmul in plain jnp and by XLA."""

import jax
import jax.numpy as jnp


def grouped_matmul_reference(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Multiply every row by every group's weight, and keep its own group's result."""
    wide = jnp.promote_types(lhs.dtype, jnp.float32)
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(lhs.shape[0])[:, None]
    belongs = (row >= ends - group_sizes) & (row < ends)
    exact = jax.lax.Precision.HIGHEST
    all_groups = jnp.einsum("mk,gkn->gmn", lhs.astype(wide), rhs.astype(wide), precision=exact)
    return jnp.where(belongs.T[..., None], all_groups, 0).sum(0).astype(lhs.dtype)


def grouped_matmul_xla(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Multiply with XLA's ragged matmul."""
    wide = jnp.promote_types(lhs.dtype, jnp.float32)
    # Rows past the last group are undefined after a ragged matmul, and in its gradient.
    counted = jnp.arange(lhs.shape[0])[:, None] < group_sizes.sum()
    product = jax.lax.ragged_dot(
        jnp.where(counted, lhs, 0), rhs, group_sizes, preferred_element_type=wide
    )
    return jnp.where(counted, product, 0).astype(lhs.dtype)
