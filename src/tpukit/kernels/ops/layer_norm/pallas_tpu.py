"""Layer norm as a Pallas kernel for TPU: those of `rms_norm`, centred."""

from typing import Any

import jax

from ...blocks.tuned import blocks_for
from ..rms_norm.blocks import RowBlocks, row_case
from ..rms_norm.pallas_tpu import RowNorm, normalise, normalise_backward

Residuals = tuple[jax.Array, jax.Array | None, jax.Array | None]


def forward(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-5,
    blocks: RowBlocks | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, Residuals]:
    """The result, and the arguments as residuals."""
    norm = RowNorm("layer_norm", eps=eps, centred=True, interpret=interpret)
    chosen = blocks_for("layer_norm", row_case(x), blocks)
    _, out = normalise(x, scale, bias, norm=norm, blocks=chosen)
    return out, (x, scale, bias)


def backward(
    residuals: Residuals,
    cotangent: jax.Array,
    *,
    eps: float = 1e-5,
    blocks: RowBlocks | None = None,
    interpret: Any = False,
) -> Residuals:
    """Gradients of x, scale and bias."""
    x, scale, bias = residuals
    norm = RowNorm("layer_norm", eps=eps, centred=True, interpret=interpret)
    chosen = blocks_for("layer_norm", row_case(x), blocks)
    dx, dscale, dbias = normalise_backward(
        x, scale, cotangent, biased=bias is not None, norm=norm, blocks=chosen
    )
    return (
        dx,
        dscale if scale is None or dscale is None else dscale.astype(scale.dtype),
        dbias if bias is None or dbias is None else dbias.astype(bias.dtype),
    )
