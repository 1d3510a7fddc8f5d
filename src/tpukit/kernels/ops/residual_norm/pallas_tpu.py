"""The residual norm as a Pallas kernel for TPU: those of `rms_norm`, with an addition.

XLA goes over the rows twice in each direction; the figures are in `specs.py`.
"""

from typing import Any

import jax

from ...blocks.tuned import blocks_for
from ..rms_norm.blocks import RowBlocks, row_case
from ..rms_norm.pallas_tpu import RowNorm, normalise, normalise_backward

OP_NAME = "residual_norm"
Residuals = tuple[jax.Array, jax.Array]


def forward(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array,
    *,
    eps: float,
    blocks: RowBlocks | None = None,
    interpret: Any = False,
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    """The new stream and its norm, and what the backward pass needs."""
    norm = RowNorm(OP_NAME, eps=eps, centred=False, interpret=interpret)
    chosen = _blocks_for(x, blocks)
    stream, normed = normalise(x, scale, None, norm=norm, blocks=chosen, added=delta)
    return (stream, normed), (stream, scale)


def backward(
    residuals: Residuals,
    cotangent: tuple[jax.Array, jax.Array],
    *,
    eps: float,
    blocks: RowBlocks | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the stream, of what was added to it, and of the scale."""
    stream, scale = residuals
    d_stream, d_normed = cotangent
    norm = RowNorm(OP_NAME, eps=eps, centred=False, interpret=interpret)
    chosen = _blocks_for(stream, blocks)
    total, d_scale, _ = normalise_backward(
        stream, scale, d_normed, biased=False, norm=norm, blocks=chosen, beside=d_stream
    )
    assert d_scale is not None  # a scale was given
    return total, total, d_scale.astype(scale.dtype)


def _blocks_for(x: jax.Array, blocks: RowBlocks | None) -> RowBlocks:
    return blocks_for(OP_NAME, row_case(x, residual=True), blocks)
