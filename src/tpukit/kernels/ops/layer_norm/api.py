"""`layer_norm`: fused on TPU, XLA's own elsewhere."""

from functools import partial

import jax
import jax.numpy as jnp

from ....hardware.target import current_target
from ...partition.splits import Splits
from ...registry.dispatch import dispatch_with_gradient, recomputed
from ...registry.op import PALLAS_TPU, REFERENCE
from ..rms_norm.api import norm_case, row_norm_op
from ..rms_norm.pallas_tpu import (
    RowBlocks,
    check_arguments,
    fits,
    row_norm_passes,
)


def plain_layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-5,
) -> jax.Array:
    """Normalise the last axis to mean 0 and variance 1, in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if scale is not None:
        wide = wide * scale
    if bias is not None:
        wide = wide + bias
    return wide.astype(x.dtype)


OP_NAME = "layer_norm"
PASSES = {
    PALLAS_TPU: row_norm_passes(OP_NAME, centred=True, eps=1e-5),
    REFERENCE: recomputed(plain_layer_norm),
}
# Rows are normalised one by one, so any leading dimension may be sharded.
SPLITS = Splits(
    free="...",
    arguments=("... d", "d", "d"),
    result="... d",
    residuals=("... d", "d", "d"),
)


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-5,
    use_fused_ops: bool = True,
    implementation: str | None = None,
    blocks: RowBlocks | None = None,
) -> jax.Array:
    """Normalise the last axis of `x` to mean 0 and variance 1, computed in float32.

    Args:
        x: (…, width), any leading shape.
        scale: (width,), or None.
        bias: (width,), or None.
        eps: Added to the variance.
        use_fused_ops: False takes XLA on every platform.
        implementation: "pallas_tpu" or "reference"; None takes the kernel on TPU where it
            supports rows of this width and dtype.
        blocks: Rows of a grid step; None takes the tuned ones.

    Raises:
        TPUKernelError: Scale or bias are not (width,), or the named implementation cannot take x.
    """
    check_arguments(OP_NAME, x, (scale, bias), implementation, use_fused_ops=use_fused_ops)
    fused = use_fused_ops and fits(x, current_target())
    return dispatch_with_gradient(
        OP_NAME,
        PASSES,
        x,
        scale,
        bias,
        splits=SPLITS,
        implementation=implementation,
        on_tpu=PALLAS_TPU if fused else REFERENCE,
        options={"eps": eps},
        pallas_options={"blocks": blocks},
    )


case = partial(norm_case, lines=2)
OP = row_norm_op(OP_NAME, layer_norm, plain_layer_norm, PASSES, SPLITS, lines=2)
