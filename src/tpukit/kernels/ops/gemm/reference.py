"""Matrix products in plain jnp: XLA's own, and the one that nothing is rounded in."""

from typing import Any

import jax
import jax.numpy as jnp

Scales = jax.Array | None


def xla_product(
    a: jax.Array, b: jax.Array, a_scales: Scales, b_scales: Scales, *, out_dtype: str, passes: str
) -> jax.Array:
    """See `pallas_tpu.product`; `passes` is the precision of float32 operands."""
    integers = jnp.issubdtype(a.dtype, jnp.integer)
    wide = jnp.int32 if integers else _wide(a.dtype)
    product = jax.lax.dot(a, b, precision=passes, preferred_element_type=wide)
    return _scaled(product, a_scales, b_scales).astype(out_dtype)


def reference_product(
    a: jax.Array, b: jax.Array, a_scales: Scales, b_scales: Scales, *, out_dtype: str, passes: str
) -> jax.Array:
    """The same, with operands widened first: `passes` changes nothing."""
    if jnp.issubdtype(a.dtype, jnp.integer):
        product = jnp.dot(a.astype(jnp.int32), b.astype(jnp.int32))
    else:
        wide = _wide(a.dtype)
        product = jnp.dot(a.astype(wide), b.astype(wide), precision=jax.lax.Precision.HIGHEST)
    return _scaled(product, a_scales, b_scales).astype(out_dtype)


def _wide(dtype: Any) -> Any:
    """What floats are summed in."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _scaled(product: jax.Array, a_scales: Scales, b_scales: Scales) -> jax.Array:
    if a_scales is None or b_scales is None:
        return product
    return product.astype(jnp.float32) * a_scales * b_scales
