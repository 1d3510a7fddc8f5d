"""Queries and keys that one product gives side by side: turned, and taken apart."""

import jax
import jax.numpy as jnp

from ...registry.dispatch import Passes, dispatch_with_gradient
from ...registry.op import REFERENCE, TRITON
from . import gpu, reference
from .gpu import Heads
from .reference import Table

OP_NAME = "rope_apart"


def rope_apart(
    joined: jax.Array, cos: Table, sin: Table, *, heads: Heads
) -> tuple[jax.Array, jax.Array]:
    """Queries (B, S, H, D) and keys (B, S, KV, D), turned as `rope` does.

    Args:
        joined: (B, S, (H + KV) * D), queries first.
        cos: (B, S, D / 2); tables have no gradient.
        sin: The same.
        heads: H and KV.
    """
    tokens = joined.shape[0] * joined.shape[1]
    return dispatch_with_gradient(
        OP_NAME,
        PASSES,
        joined,
        cos,
        sin,
        on_tpu=REFERENCE,
        on_gpu=TRITON if gpu.fits(tokens, 2 * cos.shape[-1]) else REFERENCE,
        options={"heads": heads},
    )


def _forward(
    joined: jax.Array, cos: jax.Array, sin: jax.Array, *, heads: Heads
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    every = joined.reshape(*joined.shape[:2], sum(heads), -1)
    turned = reference.rope(every, cos, sin)
    return (turned[:, :, : heads[0]], turned[:, :, heads[0] :]), (cos, sin)


def _backward(
    residuals: tuple[jax.Array, jax.Array],
    cotangent: tuple[jax.Array, jax.Array],
    *,
    heads: Heads,
) -> tuple[jax.Array, None, None]:
    cos, sin = residuals
    turned = reference.rope(jnp.concatenate(cotangent, axis=2), cos, -sin)
    return turned.reshape(*turned.shape[:2], -1), None, None


PASSES = {TRITON: Passes(gpu.forward, gpu.backward), REFERENCE: Passes(_forward, _backward)}
