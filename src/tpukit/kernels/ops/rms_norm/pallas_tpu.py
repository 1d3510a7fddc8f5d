"""RMS norm as a Pallas kernel for TPU: the passes over whole rows of `row_norm`, not centred."""

from typing import Any

import jax

from ...blocks.rows import RowBlocks, row_case
from ...blocks.tuned import blocks_for
from ...row_norm.kernel import RowNorm, normalise, normalise_backward

Residuals = tuple[jax.Array, jax.Array | None]


def forward(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    blocks: RowBlocks | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, Residuals]:
    """The result, and the arguments as residuals."""
    norm = RowNorm("rms_norm", eps=eps, centred=False, interpret=interpret)
    chosen = blocks_for("rms_norm", row_case(x), blocks)
    _, out = normalise(x, scale, None, norm=norm, blocks=chosen)
    return out, (x, scale)


def backward(
    residuals: Residuals,
    cotangent: jax.Array,
    *,
    eps: float = 1e-6,
    blocks: RowBlocks | None = None,
    interpret: Any = False,
) -> Residuals:
    """Gradients of x and scale."""
    x, scale = residuals
    norm = RowNorm("rms_norm", eps=eps, centred=False, interpret=interpret)
    chosen = blocks_for("rms_norm", row_case(x), blocks)
    dx, dscale, _ = normalise_backward(x, scale, cotangent, biased=False, norm=norm, blocks=chosen)
    return dx, dscale if scale is None or dscale is None else dscale.astype(scale.dtype)
