"""Sums between pods in eight bits, with what rounding lost carried over to the next step.

Each pod rounds its data, sends to every other pod its part, adds up what it was sent, rounds the
sum and sends it back: a quarter of the bytes of float32. Both roundings keep their error and add it
the next time, so that over many steps nothing is lost but the last error (1-bit Adam,
arXiv 2102.02888; error feedback, arXiv 1901.09847).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .sums import DCN

BLOCK = 256
"""Numbers that share a scale."""


class RoundingResiduals(NamedTuple):
    """What rounding has lost so far, on one device.

    Attributes:
        sent: Of the data that it sends.
        summed: Of the part of the sum that it makes.
    """

    sent: jax.Array
    summed: jax.Array

    @classmethod
    def zeros(cls, size: int, pods: int) -> "RoundingResiduals":
        """Return none, for a piece of `size` numbers."""
        return cls(jnp.zeros(size, jnp.float32), jnp.zeros(size // pods, jnp.float32))


def compressed_sum(
    piece: jax.Array, residuals: RoundingResiduals, pods: int
) -> tuple[jax.Array, RoundingResiduals]:
    """Return the sum over pods of `piece`, rounded, and what the rounding lost.

    Args:
        piece: One dimension; a multiple of `pods` times `BLOCK`.
        residuals: Of the step before.
        pods: Size of the axis "dcn".
    """
    wanted = piece.astype(jnp.float32) + residuals.sent
    codes, scales = _round(wanted)
    lost = wanted - _restore(codes, scales)
    # Row i goes to pod i; row i then came from pod i.
    codes = lax.all_to_all(codes.reshape(pods, -1, BLOCK), DCN, 0, 0)
    scales = lax.all_to_all(scales.reshape(pods, -1), DCN, 0, 0)
    total = (codes * scales[..., None]).sum(0).reshape(-1) + residuals.summed
    codes, scales = _round(total)
    lost_of_sum = total - _restore(codes, scales)
    codes = lax.all_gather(codes, DCN, tiled=True)
    scales = lax.all_gather(scales, DCN, tiled=True)
    return _restore(codes, scales).astype(piece.dtype), RoundingResiduals(lost, lost_of_sum)


def _round(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (blocks, BLOCK) codes in int8 and a scale for each block."""
    blocks = values.reshape(-1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=1) / 127
    safe = jnp.where(scales > 0, scales, 1.0)
    return jnp.round(blocks / safe[:, None]).astype(jnp.int8), scales


def _restore(codes: jax.Array, scales: jax.Array) -> jax.Array:
    return (codes * scales[:, None]).reshape(-1)
